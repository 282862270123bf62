"""The order of the calls by which a file becomes durable: its content, its name, then the entry of its folder.

After a power failure either the previous content or the new one is there, complete.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common import files


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The calls of fsync (file, its content at that time) and of rename (from, to), in order; temporary names cut."""
    found: list[tuple[str, ...]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def name(path: Any) -> str:
        cut = files._TEMPORARY.fullmatch(Path(path).name)
        return Path(path).name if cut is None else cut["target"] + Path(path).suffix

    def record_fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        content = sorted(map(name, path.iterdir())) if path.is_dir() else [path.read_text()]
        found.append(("fsync", name(path), *content))
        fsync(handle)

    def record_replace(source: Any, target: Any, **options: Any) -> None:
        found.append(("rename", name(source), name(target)))
        replace(source, target, **options)

    def record_rename(source: Any, target: Any, **options: Any) -> None:
        found.append(("rename", name(source), name(target)))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(os, "rename", record_rename)
    return found


def test_a_file_is_on_disk_before_it_has_its_name_and_its_folder_after(tmp_path: Path, calls: list[Any]) -> None:
    folder = tmp_path / "notes"
    for text in ("first", "second"):
        calls.clear()
        files.write_text(folder / "note.json", text)
        assert calls == [
            ("fsync", "note.json.tmp", text),
            ("rename", "note.json.tmp", "note.json"),
            ("fsync", "notes", "note.json"),
        ]
    assert (folder / "note.json").read_text() == "second"


def test_a_folder_is_on_disk_with_all_its_files_before_it_replaces_another(tmp_path: Path, calls: list[Any]) -> None:
    target = tmp_path / "all" / "checkpoint"
    for text in ("first", "second"):
        calls.clear()
        with files.atomic_path(target) as temp:
            (temp / "model").mkdir(parents=True)
            (temp / "model" / "weights").write_text(text)
            (temp / "manifest").write_text(text)
        *synced, last = calls[: calls.index(("rename", "checkpoint.tmp", "checkpoint"))]
        renamed = [call for call in synced if call[0] == "rename"] + ([last] if last[0] == "rename" else [])
        assert renamed == ([("rename", "checkpoint", "checkpoint.old")] if text == "second" else [])
        before = [call for call in (*synced, last) if call[0] == "fsync"]
        assert sorted(before[:-1]) == [
            ("fsync", "manifest", text), ("fsync", "model", "weights"), ("fsync", "weights", text),
        ]  # fmt: skip
        assert before[-1] == ("fsync", "checkpoint.tmp", "manifest", "model"), "the folder after what is in it"
        assert calls[-1] == ("fsync", "all", "checkpoint")
    assert (target / "model" / "weights").read_text() == "second"


def test_nothing_is_renamed_if_a_file_cannot_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "note.json", "first")

    def fail(handle: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files.write_text(tmp_path / "note.json", "second")
    assert [file.name for file in tmp_path.iterdir()] == ["note.json"]
    assert (tmp_path / "note.json").read_text() == "first"


def test_without_sync_nothing_is_fsynced(tmp_path: Path, calls: list[Any]) -> None:
    with files.atomic_path(tmp_path / "state", sync=False) as temp:
        temp.write_text("state")
    assert calls == [("rename", "state.tmp", "state")]
