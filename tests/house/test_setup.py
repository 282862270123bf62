"""``scripts/setup.sh`` refuses what it cannot use before it creates anything."""

import os
import subprocess
from pathlib import Path

import pytest

from scripts.lock import REPOSITORY


def set_up(environment: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run the set-up with an interpreter."""
    return subprocess.run(
        [REPOSITORY / "scripts" / "setup.sh", environment],
        env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def interpreter(folder: Path, version: str) -> Path:
    """A program that answers as the interpreter of another version would, for few machines have one."""
    program = folder / f"python{version}"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10", "3.14"])
def test_another_python_is_refused_with_its_version_and_what_to_do(tmp_path: Path, version: str) -> None:
    done = set_up(tmp_path / "venv", interpreter(tmp_path, version))
    assert done.returncode == 1
    assert f"is Python {version}" in done.stderr and "make setup PYTHON=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_the_error_names_a_missing_interpreter(tmp_path: Path) -> None:
    done = set_up(tmp_path / "venv", tmp_path / "nowhere")
    assert done.returncode == 1
    assert f"{tmp_path / 'nowhere'} does not run" in done.stderr


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    done = set_up(tmp_path / "home", interpreter(tmp_path, "3.12"))
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_the_set_up_prints_its_progress(tmp_path: Path) -> None:
    """With an interpreter that installs nothing."""
    stub = interpreter(tmp_path, "3.12")
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / "python").symlink_to(stub)
    done = set_up(environment, stub)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("set-up:")]
    assert "  0 of 2" in lines[0] and "next: absl-py to " in lines[0]
    assert "next: torch==" in lines[-2] and "done in 0:" in lines[-1]
    assert len(lines) > 10
