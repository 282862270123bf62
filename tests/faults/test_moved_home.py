"""A project that is moved or copied as a whole finds its files in its new place: notes, checkpoints, MLflow."""

import shutil
from pathlib import Path

import pytest

from rft_platform.cli.commands.demo import move_aside
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.model_registry.manifests import read_manifest
from rft_platform.model_registry.sqlite_reader import read_versions
from rft_platform.rounds.project.policy import take_snapshot
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, required, snapshot_of
from rft_platform.rounds.setup.connections import connect_registry, local_uri


@pytest.mark.slow
def test_a_moved_home_finds_its_files(project: Project, make_checkpoint):
    home = project.home
    start, folder, outside = make_checkpoint(0), make_checkpoint(2), project.config.model.model_path
    registry = connect_registry(project)
    run = registry.training_run("faults")
    registry.register_checkpoint(folder, 2, {"weights_digest": "d2"}, run.run_id)
    publish(project.store, Policy(str(folder), 2, "d2", 1))
    take_snapshot(project.store, 2, 0)

    moved = Home(move_aside(home))

    assert not home.root.exists()
    opened = Project.open(moved)
    here = moved.root / folder.relative_to(home.root)
    assert required(opened.store, 1).folder == snapshot_of(opened.store, 2).folder == str(here)
    assert read_manifest(here).parent_folder == moved.root / start.relative_to(home.root)
    assert load_config(moved.config_file).model.model_path == outside  # what lies elsewhere stays where it is
    assert [version.folder for version in read_versions(local_uri(moved), project.model_name) or []] == [here]
    again = connect_registry(opened)
    assert again.resolve("models:/paper-faults/1", verify=True).folder == here
    found = again.training_run("faults")
    report = moved.root / "report.md"
    report.write_text("all is well")
    found.log_artifact(report)
    assert found.run_id == run.run_id
    assert list((moved.mlflow / "artifacts").rglob("report.md"))
    assert not _mentions(moved.rounds, f"{home.root}/")


@pytest.mark.slow
def test_a_copy_does_not_touch_the_original(project: Project, make_checkpoint):
    start, folder = make_checkpoint(0), make_checkpoint(2)
    registry = connect_registry(project)
    registry.register_checkpoint(folder, 2, {"weights_digest": "d2"}, registry.training_run("faults").run_id)
    publish(project.store, Policy(str(folder), 2, "d2", 1))
    copy = Home(project.home.root.with_name("a copy"))
    shutil.copytree(project.home.root, copy.root)

    here = copy.root / folder.relative_to(project.home.root)
    assert required(Project.open(copy).store, 1).folder == str(here)
    assert read_manifest(here).parent_folder == copy.root / start.relative_to(project.home.root)
    assert connect_registry(Project.open(copy)).resolve("models:/paper-faults/1").folder == here
    assert [version.folder for version in read_versions(local_uri(copy), project.model_name) or []] == [here]
    assert [version.folder for version in read_versions(local_uri(project.home), project.model_name) or []] == [folder]


def _mentions(root: Path, text: str) -> list[Path]:
    files = [file for file in root.rglob("*") if file.is_file() and file.suffix in (".json", ".yaml")]
    return [file for file in files if text in file.read_text(encoding="utf-8")]
