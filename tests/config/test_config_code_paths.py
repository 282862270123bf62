"""Code that a configuration names by file lies where the configuration lies."""

import os
from pathlib import Path

import pytest

from rft_platform.config.paths import resolve_paths


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
        resolved = resolve_paths({"explorer": {"workers": {"python": given}}}, tmp_path)
        assert resolved["explorer"]["workers"]["python"] == expected
    assert os.path.realpath(python) != str(python)


@pytest.mark.parametrize("explorer", [None, 3, {"workers": None}, {"workers": {"python": None}}])
def test_malformed_sections_are_left_to_the_schema(tmp_path: Path, explorer: object) -> None:
    assert resolve_paths({"explorer": explorer}, tmp_path) == {"explorer": explorer}
