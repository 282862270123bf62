"""Removal of objects that interrupted uploads left behind: those of commits, running uploads and other homes stay."""

import os
import threading
import time
from pathlib import Path

import pytest

from rft_platform.common.errors import StoreTakenError, TransientError, UserError
from rft_platform.common.files import write_text
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.mirror import ORPHAN_GRACE_S, HomeMirror, store_changes
from tests.experience.samples import rollouts
from tests.object_store.conftest import drives, explored


def interrupted(root: Path, mirror: HomeMirror, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage whose process ends after the upload of its rows and before the commit."""

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            explored(root, number)


def objects(tmp_path: Path) -> set[Path]:
    return {path for path in (tmp_path / "bucket" / "project" / "files").rglob("*") if path.is_file()}


def age(paths: set[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def test_old_objects_that_no_commit_names_are_removed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    rows = explored(root).rollout_rows(1)
    named = objects(tmp_path)
    interrupted(root, mirror, 2, monkeypatch)
    left = objects(tmp_path) - named
    assert len(left) == 3  # the rows; a pack with the note and the ledger; a pack with the index of the row ids
    age(named | left, ORPHAN_GRACE_S - 60.0)
    assert mirror.remove_orphans() == (0, 0)
    age(named | left, ORPHAN_GRACE_S + 60.0)
    size = sum(path.stat().st_size for path in left)
    assert mirror.remove_orphans(dry_run=True) == (len(left), size) and objects(tmp_path) == named | left
    assert mirror.remove_orphans() == (len(left), size) and objects(tmp_path) == named
    assert mirror.remove_orphans() == (0, 0)
    explored(root, 2)
    second, _ = drives(tmp_path, "second", url)
    store = ExperienceStore(second / "rounds")
    assert store.rollout_rows(1) == rows and store.rollout_rows(2) == rollouts(round=2)


def test_an_upload_that_runs_keeps_its_objects(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, mirror = drives(tmp_path, "home", url)
    explored(root)
    named, uploaded, go_on, create = objects(tmp_path), threading.Event(), threading.Event(), mirror.remote.create

    def waits(name: str, content: bytes) -> bool:
        uploaded.set()
        assert go_on.wait(60.0)
        return create(name, content)

    monkeypatch.setattr("rft_platform.object_store.mirror._UPLOADS_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "create", waits)
        stage = threading.Thread(target=lambda: explored(root, 2))
        stage.start()
        try:
            assert uploaded.wait(60.0)
            age(objects(tmp_path), 2 * ORPHAN_GRACE_S)  # a slow upload: a store may give the time of its start
            with pytest.raises(TransientError, match="uploads"):
                HomeMirror(root).remove_orphans()
            with pytest.raises(TransientError, match="uploads"):
                HomeMirror(root).remove_orphans(0.0)
        finally:
            go_on.set()
            stage.join()
    assert len(objects(tmp_path)) > len(named)
    assert mirror.remove_orphans(0.0) == (0, 0)
    second, _ = drives(tmp_path, "second", url)
    assert ExperienceStore(second / "rounds").rollout_rows(2) == rollouts(round=2)


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_home_that_lost_the_project_removes_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mirror = drives(tmp_path, "first", url)
    explored(first)
    second, other = drives(tmp_path, "second", url)
    interrupted(second, other, 2, monkeypatch)
    left = objects(tmp_path)
    age(left, 2 * ORPHAN_GRACE_S)
    with pytest.raises(StoreTakenError, match="another home has continued"):
        mirror.remove_orphans()
    with other.driving(), pytest.raises(UserError, match="drives this project"):
        mirror.remove_orphans()
    assert left <= objects(tmp_path)


def test_a_home_keeps_the_objects_while_another_one_takes_over(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, mirror = drives(tmp_path, "first", url)
    explored(first)
    listed, stored = mirror.remote.objects, list[Path]()

    def taken_over(folder: str) -> object:
        found = listed(folder)
        second, _ = drives(tmp_path, "second", url)  # after the list was read and before the commits are
        stored.extend(ExperienceStore(second / "rounds").rollout_files(1))
        return found

    before = objects(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "objects", taken_over)
        with pytest.raises(StoreTakenError):
            mirror.remove_orphans(0.0)
    assert stored and before <= objects(tmp_path)


def test_an_erasure_leaves_no_object_of_an_interrupted_upload(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    explored(root)
    interrupted(root, mirror, 2, monkeypatch)
    store_changes(root, erase=True)
    assert objects(tmp_path) == {tmp_path / "bucket" / "project" / name for name in named_by(mirror)}


def test_an_erasure_rewrites_packs_that_hold_old_contents(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store = ExperienceStore(root / "rounds")
    write_text(root / "rounds" / "r0001" / "figures.json", '{"text": "a person"}')
    store.write_note(1, "progress", {"number": 1})  # in the pack of the other document
    write_text(root / "rounds" / "r0001" / "figures.json", '{"text": "erased"}')
    mirror.commit()
    assert any(b"a person" in path.read_bytes() for path in objects(tmp_path))
    store_changes(root, erase=True)
    assert not any(b"a person" in path.read_bytes() for path in objects(tmp_path))
    second, _ = drives(tmp_path, "second", url)
    assert ExperienceStore(second / "rounds").read_note(1, "progress") == {"number": 1}
    assert (second / "rounds" / "r0001" / "figures.json").read_text() == '{"text": "erased"}'


def named_by(mirror: HomeMirror) -> set[str]:
    """The objects that the newest commit names."""
    return {file.object for file in mirror._state.known().committed.files.values()}
