"""The folder of a user's file, with the model and the data in it, may be moved, copied or mounted elsewhere."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from rft_platform.common.errors import UserError
from rft_platform.component import ConfiguredProject
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.rounds.project.policy import take_snapshot
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, required, snapshot_of
from rft_platform.rounds.setup.taskset_binding import measured_by
from rft_platform.run.project_checks import check_may_start
from rft_platform.run.start import is_in_force, write_config

FILES = ("rft.yaml", "model", "train.jsonl", "test.jsonl", "judge.py", "users.py")
USER = "users.py:user"
Move = Callable[[Path, Path], Any]


@pytest.fixture
def started(home: Home, write_config: Callable[..., Path], tmp_path: Path) -> Path:
    """The file of a project that has explored with its base model."""
    (tmp_path / "judge.py").write_text("def judge(task, response):\n    return 1.0\n")
    tasksets = {
        "taskset": {"path": "train.jsonl", "judge": "judge.py:judge"},
        "eval_tasksets": [
            {"path": "test.jsonl", "judge": "judge.py:judge", "workflow": "dialogue", "workflow_args": {"user": USER}}
        ],
    }
    (tmp_path / "users.py").write_text("def user(messages):\n    return None\n")
    file = write_config(buffer={"batch_size": 8, "total_steps": 2, "explorer_input": tasksets})
    put_in_force(home, file)
    store = Project.open(home).store
    publish(store, Policy(str(tmp_path / "model"), 0, "0" * 64, 0))
    take_snapshot(store, 1, 0)
    return file


def put_in_force(home: Home, file: Path) -> None:
    config = load_config(file)
    check_may_start(home, config)
    write_config(home, config)


def how_measured(home: Home) -> str:
    project = Project.open(home)
    (held_out,) = project.config.buffer.explorer_input.eval_tasksets
    return measured_by(project, held_out)


def move_all(folder: Path, target: Path, move: Move) -> Path:
    """Move or copy the user's files; returns the new place of ``rft.yaml``."""
    target.mkdir()
    for name in FILES:
        move(folder / name, target / name)
    return target / "rft.yaml"


def copy(source: Path, target: Path) -> object:
    return shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


@pytest.mark.parametrize("move", [Path.rename, copy], ids=["moved", "copied"])
@pytest.mark.parametrize("with_home", [True, False], ids=["with its home", "without its home"])
def test_a_project_continues_in_another_folder(
    started: Path, home: Home, tmp_path: Path, move: Move, with_home: bool
) -> None:
    measured = how_measured(home)
    moved = move_all(tmp_path, tmp_path / "elsewhere", move)
    if with_home:
        move(home.root, moved.parent / ".rft")
        home = Home(moved.parent / ".rft")
    assert not is_in_force(home, load_config(moved))
    for _ in range(2):
        put_in_force(home, moved)
        assert is_in_force(home, load_config(moved))
    config, store = Project.open(home).config, Project.open(home).store
    assert config.model.model_path == str(moved.parent / "model")
    assert how_measured(home) == measured, "the evaluations of both folders are compared"
    assert required(store, 0).folder == snapshot_of(store, 1).folder == str(moved.parent / "model")


def test_a_component_continues_in_a_project_that_moved(started: Path, home: Home, tmp_path: Path) -> None:
    settings = yaml.safe_load(started.read_text())
    moved = move_all(tmp_path, tmp_path / "elsewhere", Path.rename)
    by_file = ConfiguredProject(home=str(home.root), config=str(moved))
    by_settings = ConfiguredProject(home=str(home.root), settings=settings, folder=str(moved.parent))
    for component in (by_file, by_settings):
        config = component.read()
        check_may_start(home, config)
        write_config(home, config)
        assert is_in_force(home, by_file.read()) and is_in_force(home, by_settings.read())


@pytest.mark.slow
@pytest.mark.parametrize("move", [Path.rename, copy], ids=["moved", "copied"])
def test_a_component_opens_a_project_that_moved(
    started: Path, home: Home, tmp_path: Path, tiny_model: Path, move: Move
) -> None:
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(tiny_model, tmp_path / "model")
    move(home.root, tmp_path / "new home")
    moved = move_all(tmp_path, tmp_path / "elsewhere", move)
    component = ConfiguredProject(home=str(tmp_path / "new home"), config=str(moved))
    assert component.open().config.model.model_path == str(moved.parent / "model")
    moved.write_text(moved.read_text() + "seed: 7\n")
    assert component.open().config.seed == 42, "what a run has opened stays"
    with pytest.raises(UserError, match="seed: was 42, is 7"):
        ConfiguredProject(home=str(tmp_path / "new home"), config=str(moved)).open()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"model_path": "other"}}, "model.model_path: was '{old}/model', is '{new}/other'"),
        ({"model": {"model_path": "{old}/other"}}, "model.model_path: was '{old}/model', is '{old}/other'"),
        ({"checkpoint_root_dir": "./saved"}, "checkpoint_root_dir: was None, is '{new}/saved'"),
        ({"seed": 7}, "seed: was 42, is 7"),
    ],
)
def test_another_model_is_refused_in_another_folder_too(
    started: Path, home: Home, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    moved = move_all(tmp_path, tmp_path / "elsewhere", copy)
    shutil.copytree(tmp_path / "model", moved.parent / "other")
    text = yaml.safe_dump({**yaml.safe_load(moved.read_text()), **changes}).replace("{old}", str(tmp_path))
    moved.write_text(text)
    with pytest.raises(UserError) as refused:
        put_in_force(home, moved)
    _, *lines = str(refused.value).splitlines()
    assert lines == [named.format(old=tmp_path, new=moved.parent)]


def test_the_same_name_in_another_folder_of_the_file_is_another_model(
    started: Path, home: Home, tmp_path: Path
) -> None:
    """The file stays, so its paths have not moved."""
    (tmp_path / "second").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / "second" / "model")
    started.write_text(started.read_text().replace("model_path: model", "model_path: second/model"))
    with pytest.raises(UserError, match=r"model.model_path: was '.*/model', is '.*/second/model'"):
        put_in_force(home, started)


def test_the_file_of_the_home_does_not_change_where_paths_start(started: Path, home: Home, tmp_path: Path) -> None:
    put_in_force(home, home.config_file)
    assert Project.open(home).config.model.model_path == str(tmp_path / "model")
    moved = move_all(tmp_path, tmp_path / "elsewhere", Path.rename)
    put_in_force(home, moved)
    assert Project.open(home).config.model.model_path == str(moved.parent / "model")


def test_the_dry_run_of_a_moved_project_shows_its_plan(
    started: Path, home: Home, tmp_path: Path, rft: Callable[..., Result]
) -> None:
    moved = move_all(tmp_path, tmp_path / "elsewhere", Path.rename)
    result = rft("run", "--dry-run", "--config", moved)
    assert result.exit_code == 0, result.stderr
    assert "rounds: 2" in result.stdout
