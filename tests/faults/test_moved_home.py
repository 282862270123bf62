"""A project that is moved as a whole points into its new place, in its notes, its manifests and MLflow."""

import shutil
from pathlib import Path

from rft_platform.cli.commands.demo import move_aside
from rft_platform.common.digests import MANIFEST
from rft_platform.common.files import read_json
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.rounds.project.policy import Policy, publish, required, snapshot_of, take_snapshot
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import connect_registry


def test_nothing_in_a_moved_home_names_the_old_place(project: Project, make_checkpoint):
    home = project.home
    folder, outside = make_checkpoint(2), project.config.model.model_path
    registry = connect_registry(project)
    run = registry.training_run("faults")
    registry.register_checkpoint(folder, 2, {"weights_digest": "d2"}, run.run_id)
    publish(project.store, Policy(str(folder), 2, "d2", 1))
    take_snapshot(project.store, 2, 0)
    before = read_json(folder / MANIFEST)

    moved = Home(move_aside(home))

    assert not home.root.exists()
    opened = Project.open(moved)
    here = moved.root / folder.relative_to(home.root)
    assert required(opened.store, 1).folder == snapshot_of(opened.store, 2).folder == str(here)
    assert read_json(here / MANIFEST)["files"] == before["files"]
    assert read_json(here / MANIFEST)["parent"] == str(here.with_name("global_step_0"))
    assert load_config(moved.config_file).model.model_path == outside  # what lies elsewhere stays where it is
    again = connect_registry(opened)
    assert again.resolve("models:/paper-faults/1", verify=True).folder == here
    found = again.training_run("faults")
    report = moved.root / "report.md"
    report.write_text("all is well")
    found.log_artifact(report)
    assert found.run_id == run.run_id
    assert list((moved.mlflow / "artifacts").rglob("report.md"))
    assert not _mentions(moved.root, str(home.root) + "/")


def test_a_new_project_in_the_old_place_does_not_touch_the_moved_one(project: Project, make_checkpoint):
    folder = make_checkpoint(2)
    publish(project.store, Policy(str(folder), 2, "d2", 1))
    moved = Home(move_aside(project.home))
    shutil.copytree(moved.root, project.home.root)  # the place is taken again
    assert required(Project.open(moved).store, 1).folder.startswith(str(moved.root))


def _mentions(root: Path, text: str) -> list[Path]:
    files = [file for file in root.rglob("*") if file.is_file() and file.suffix in (".json", ".yaml")]
    return [file for file in files if text in file.read_text(encoding="utf-8")]
