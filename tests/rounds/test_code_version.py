"""The code version is the package's own, wherever the command was given."""

import subprocess
from pathlib import Path

import pytest

from rft_platform.rounds.project.code_version import code_version


def test_the_working_folder_may_be_another_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    code_version.cache_clear()
    here = code_version()
    code_version.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert code_version() == here
    other = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert other.stdout.strip() not in here
