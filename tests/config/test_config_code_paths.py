"""Paths and code that a configuration names are found from its own folder, also in a home that was copied or moved."""

import os
from pathlib import Path
from typing import Any

import pytest

from rft_platform.config.paths import relative_paths, resolve_paths, seen_from


def test_references_to_files_beside_the_configuration_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    taskset = {
        "workflow": "agent.py:workflow",
        "workflow_args": {"toolkit": "./agent.py:make_toolkit"},
        "judge": [{"judge": "agent.py:judge", "weight": 1.0}],
        "path": "agent.py says nothing",
    }
    resolved = resolve_paths({"buffer": {"explorer_input": {"taskset": taskset}}}, tmp_path)
    assert resolved["buffer"]["explorer_input"]["taskset"] == {
        "workflow": f"{tmp_path}/agent.py:workflow",
        "workflow_args": {"toolkit": f"{tmp_path}/agent.py:make_toolkit"},
        "judge": [{"judge": f"{tmp_path}/agent.py:judge", "weight": 1.0}],
        "path": "agent.py says nothing",
    }


@pytest.mark.parametrize("name", ["missing.py:workflow", "package.module:workflow", "single_turn"])
def test_other_names_of_code_are_left_alone(tmp_path: Path, name: str) -> None:
    assert resolve_paths({"workflow": name}, tmp_path) == {"workflow": name}


def test_an_environments_interpreter_stays_a_link(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    for given, expected in ((".venv/bin/python", str(python)), ("python3.12", "python3.12")):
        resolved = resolve_paths({"explorer": {"workers": {"python": given}}, "engine": {"python": given}}, tmp_path)
        assert resolved["explorer"]["workers"]["python"] == resolved["engine"]["python"] == expected
        assert seen_from(resolved, tmp_path)["engine"]["python"] == given
    assert os.path.realpath(python) != str(python)


@pytest.mark.parametrize("explorer", [None, 3, {"workers": None}, {"workers": {"python": None}}])
def test_malformed_sections_are_left_to_the_schema(tmp_path: Path, explorer: object) -> None:
    assert resolve_paths({"explorer": explorer}, tmp_path) == {"explorer": explorer}


def settings(home: Path, root: Path, outside: Path) -> dict[str, Any]:
    """A configuration whose model and judge are in ``home``, its checkpoints in ``root``."""
    taskset = {"path": f"{outside}/tasks.jsonl", "judge": f"{home}/own/judge.py:share", "workflow": "single_turn"}
    return {
        "checkpoint_root_dir": str(root),
        "monitor": {"tensorboard_dir": f"{root}/p/n/monitor"},
        "model": {"model_path": f"{home}/own/model", "critic_model_path": "org/critic"},
        "buffer": {"explorer_input": {"taskset": taskset}},
    }


@pytest.mark.parametrize("inside", [True, False])
def test_a_homes_configuration_means_the_same_in_its_copy(tmp_path: Path, inside: bool) -> None:
    """``inside``: checkpoints in the home, the default; otherwise the home is in their folder, as with ``tune()``."""
    first, second = tmp_path / "first", tmp_path / "second"
    homes = [place / "p" / "n" / ".rft" for place in (first, second)]
    roots = [home / "checkpoints" for home in homes] if inside else [first, second]
    for home in homes:
        (home / "own").mkdir(parents=True)
        (home / "own" / "judge.py").touch()
    given, copied = (settings(*places, tmp_path) for places in zip(homes, roots, strict=True))
    stored = relative_paths(given, homes[0])
    assert str(first) not in str(stored)
    assert resolve_paths(stored, homes[0]) == given
    assert resolve_paths(stored, homes[1]) == copied


def test_what_is_outside_the_home_stays_absolute(tmp_path: Path) -> None:
    elsewhere = settings(tmp_path / "other", tmp_path / "checkpoints", tmp_path)
    assert relative_paths(elsewhere, tmp_path / "home") == elsewhere
