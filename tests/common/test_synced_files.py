"""Files that are fsynced while they are written: errors of an early fsync are not lost."""

import os
import shutil
import time
from pathlib import Path

import pytest

from rft_platform.common import files


def _wait_for(count: int, calls: list[str]) -> None:
    deadline = time.monotonic() + 20
    while len(calls) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_below_the_folder_are_synced_during_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(files, "fsync", lambda file: calls.append(file.name))
    (tmp_path / "model").mkdir()
    with files.synced_while_written(tmp_path):
        (tmp_path / "model" / "master.safetensors").write_bytes(b"x" * 100)
        _wait_for(4, calls)  # the folder and the file, at least twice
    assert calls.count("master.safetensors") >= 1


def test_an_error_of_an_early_fsync_is_raised_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fails_once(file: Path) -> None:
        calls.append(file.name)
        if len(calls) == 1:
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr(files, "fsync", fails_once)
    (tmp_path / "a").write_bytes(b"x")
    finished = False
    with pytest.raises(OSError, match="Input/output error"), files.synced_while_written(tmp_path):
        _wait_for(1, calls)
        finished = True
    assert finished
    assert len(calls) == 1  # nothing is synced after the error


def test_a_file_that_is_removed_during_the_block_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    fsync = files.fsync

    def removes_first(file: Path) -> None:
        if file.name.endswith(".written"):
            file.unlink()
            removed.append(file.name)
        fsync(file)

    monkeypatch.setattr(files, "fsync", removes_first)
    with files.synced_while_written(tmp_path):
        for number in range(3):
            (tmp_path / f"rank-{number}.written").touch()
        _wait_for(3, removed)
    assert sorted(removed) == [f"rank-{number}.written" for number in range(3)]


def test_a_folder_that_is_removed_during_the_block_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = files.fsync

    def removes_the_other(file: Path) -> None:
        if file.name == "part":
            for other in {tmp_path / "one.parts", tmp_path / "two.parts"} - {file.parent}:
                shutil.rmtree(other, ignore_errors=True)
        fsync(file)
        synced.append(file.name)

    monkeypatch.setattr(files, "fsync", removes_the_other)
    for name in ("one.parts", "two.parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(b"x")
    with files.synced_while_written(tmp_path):
        _wait_for(6, synced)
    assert len(list(tmp_path.iterdir())) == 1
