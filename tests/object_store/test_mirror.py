"""The copy of a home on an object store: commits, take-over by another home, fencing, what is fetched when."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import StoreTakenError, TransientError, UserError
from rft_platform.common.files import digest_file, write_json, write_sealed_json, write_text
from rft_platform.experience.queries import connect, find_row
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store import commits
from rft_platform.object_store.home_state import HomeState, StateFile
from rft_platform.object_store.mirror import (
    HomeMirror,
    fetch_missing,
    mirror_of,
    open_mirror,
    removing,
    restore_stored,
    store_changes,
)
from rft_platform.object_store.remote_files import StoredFile
from tests.experience.samples import rollouts
from tests.object_store.conftest import drives, explored


def committed(root: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((root / "store" / "state.json").read_text())["committed"]["files"]
    return files


def test_a_home_without_a_store_has_no_mirror_and_writes_nothing(tmp_path: Path) -> None:
    explored(tmp_path / "home")
    assert mirror_of(tmp_path / "home") is None and not (tmp_path / "home" / "store").exists()
    assert not fetch_missing(tmp_path / "home" / "rounds" / "r0001" / "missing.parquet")


def test_rows_and_note_are_stored_by_one_commit_before_the_note_is_here(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store = explored(root)
    assert {"rounds/r0001/rollouts/batch-0000.parquet", "rounds/r0001/files.json", "rounds/r0001/explore.json"} <= set(
        committed(root)
    )
    assert mirror.stored(store.round_folder(1) / "explore.json") is not None
    (tmp_path / "bucket" / "project" / "commits").rename(tmp_path / "bucket" / "project" / "away")
    (tmp_path / "bucket" / "project" / "commits").write_text("not a folder")
    with pytest.raises((OSError, UserError)):
        store.write_note(1, "judge", {"rows": 4})
    assert not store.has_note(1, "judge")


def test_another_home_gets_the_notes_at_once_and_the_rows_when_they_are_read(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    rows = explored(first).rollout_rows(1)
    second, _ = drives(tmp_path, "second", url)
    store = ExperienceStore(second / "rounds")
    file = store.rollout_files(1)[0]
    assert store.read_note(1, "explore") == {"rows": 4} and not file.exists()
    assert store.damaged_sizes(1, store.ledger(1).read()) == []
    assert store.rollout_rows(1) == rows and file.exists()
    assert store.damaged(1, digest=True) == []


def test_queries_read_rows_of_another_home_in_place(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    second, _ = drives(tmp_path, "second", url)
    store = ExperienceStore(second / "rounds")
    with connect(store) as connection:
        assert connection.execute("SELECT round, count(*) FROM rollouts GROUP BY round").fetchall() == [(1, 4)]
    row = rollouts(round=1)[0]
    assert find_row(store, row.row_id, ["round", "run_id"]) == {"round": 1, "run_id": row.run_id}
    assert not store.rollout_files(1)[0].exists()


def test_a_home_that_lost_the_project_stores_nothing_more(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    store = explored(first)
    second, _ = drives(tmp_path, "second", url)
    with pytest.raises(StoreTakenError, match="another home has continued"):
        store.write_note(1, "judge", {"rows": 4})
    assert not store.has_note(1, "judge")
    ExperienceStore(second / "rounds").write_note(1, "judge", {"rows": 4, "by": "second"})
    drives(tmp_path, "first", url)  # started again: it takes what the second one stored
    assert store.read_note(1, "judge") == {"rows": 4, "by": "second"}


def test_a_home_whose_last_commit_was_not_recorded_stores_nothing_after_another_home_continued(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, replaced = drives(tmp_path, "first", url)
    create = replaced.remote.create

    def lost(name: str, content: bytes) -> bool:
        create(name, content)
        raise TransientError("no answer")

    with monkeypatch.context() as patch, pytest.raises(TransientError):
        patch.setattr(replaced.remote, "create", lost)
        explored(tmp_path / "first")
    second, _ = drives(tmp_path, "second", url)
    explored(second, 2)
    before = (tmp_path / "first" / "store" / "state.json").read_text()
    with pytest.raises(StoreTakenError, match="another home has continued"):
        explored(tmp_path / "first", 3)
    assert (tmp_path / "first" / "store" / "state.json").read_text() == before
    explored(second, 4)
    assert ExperienceStore(drives(tmp_path, "third", url)[0] / "rounds").rounds() == [1, 2, 4]


def test_files_that_were_never_stored_are_moved_aside_by_a_take_over(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    store = explored(first)
    drives(tmp_path, "second", url)
    store.write_rollouts(2, 0, rollouts(round=2))
    drives(tmp_path, "first", url)
    assert store.rollout_files(2) == [] and len(store.rollout_files(1)) == 1
    assert len(list((first / "store" / "replaced").rglob("r0002/rollouts/*.parquet"))) == 1


def test_a_commit_whose_answer_was_lost_counts_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, mirror = drives(tmp_path, "home", url)
    create, calls = mirror.remote.create, list[str]()

    def lost(name: str, content: bytes) -> bool:
        calls.append(name)
        create(name, content)
        return create(name, content)  # the repetition of a request whose answer was lost

    monkeypatch.setattr(mirror.remote, "create", lost)
    explored(root)
    assert len(calls) == 1 and "rounds/r0001/explore.json" in committed(root)


def test_a_stage_that_is_interrupted_between_upload_and_commit_is_repeated_to_the_same_result(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            explored(root)
    assert not ExperienceStore(root / "rounds").has_note(1, "explore")
    rows = explored(root).rollout_rows(1)
    second, _ = drives(tmp_path, "second", url)
    taken = ExperienceStore(second / "rounds")
    assert taken.rollout_rows(1) == rows and taken.read_note(1, "explore") == {"rows": 4}


def test_many_commits_are_read_from_the_newest_complete_one(tmp_path: Path, url: str) -> None:
    root, _ = drives(tmp_path, "home", url)
    store = ExperienceStore(root / "rounds")
    for number in range(commits.EVERY + 5):
        store.write_note(1, "progress", {"number": number})
    for document in sorted((tmp_path / "bucket" / "project" / "commits").iterdir())[: commits.EVERY - 2]:
        document.unlink()
    second, _ = drives(tmp_path, "second", url)
    assert ExperienceStore(second / "rounds").read_note(1, "progress") == {"number": commits.EVERY + 4}


def test_a_truncated_object_is_refused_and_nothing_appears(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    stored = next((tmp_path / "bucket" / "project" / "files" / "rounds" / "r0001" / "rollouts").iterdir())
    stored.write_bytes(stored.read_bytes()[:-1])
    second, _ = drives(tmp_path, "second", url)
    with pytest.raises(Exception, match="bytes were received"):
        ExperienceStore(second / "rounds").rollout_rows(1)
    assert not list(second.rglob("*batch-0000.parquet*"))


def test_checkpoints_are_stored_in_the_background_and_fetched_as_a_folder(tmp_path: Path, url: str) -> None:
    first, mirror = drives(tmp_path, "first", url)
    folder = first / "checkpoints" / "p" / "n" / "global_step_2"
    write_text(folder / "model.safetensors", "weights")
    write_json(folder / "manifest.json", {})
    write_text(folder / "trainer_state" / ".saving" / "half", "")
    mirror.upload_later()
    mirror.finish()
    second, _ = drives(tmp_path, "second", url)
    brought = second / folder.relative_to(first)
    assert [path.name for path in brought.iterdir()] == ["manifest.json"]
    assert fetch_missing(brought)
    assert sorted(path.name for path in brought.iterdir()) == ["manifest.json", "model.safetensors"]


def weights(root: Path, content: str = "weights", name: str = "model.safetensors") -> Path:
    """A checkpoint whose manifest names the digest of its file."""
    folder = root / "checkpoints" / "p" / "n" / "global_step_2"
    write_text(folder / name, content)
    write_sealed_json(folder / "manifest.json", {"files": {name: {"size": 7, "sha256": digest_file(folder / name)}}})
    return folder


def test_removed_files_leave_the_store_with_the_next_commit_also_those_that_were_never_here(
    tmp_path: Path, url: str
) -> None:
    first, _ = drives(tmp_path, "first", url)
    rows = explored(first).rollout_files(1)[0].relative_to(first)
    weights(first)
    store_changes(first)
    second, mirror = drives(tmp_path, "second", url)
    folder = weights(first).relative_to(first)
    with removing(second / "rounds" / "r0001" / "explore.json", second / rows, second / folder / "model.safetensors"):
        (second / "rounds" / "r0001" / "explore.json").unlink()
    assert not ExperienceStore(second / "rounds").is_stored(second / rows)
    assert fetch_missing(second / folder) and not (second / folder / "model.safetensors").exists()
    assert rows.as_posix() in committed(second)
    mirror.commit(["checkpoints"])  # other files are dropped by a commit of their folder
    assert f"{folder}/model.safetensors" not in committed(second) and rows.as_posix() in committed(second)
    mirror.commit(grace_s=0.0)
    assert set(committed(second)) == {"rounds/r0001/files.json", f"{folder}/manifest.json"}
    assert [path.name for path in (tmp_path / "bucket" / "project" / "files").rglob("*batch*")] == []
    drives(tmp_path, "third", url)
    assert not (tmp_path / "third" / "rounds" / "r0001" / "explore.json").exists()


def test_lost_files_stay_stored_and_are_fetched_again(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store, folder = explored(root), weights(root)
    mirror.finish()
    rows, before = store.rollout_rows(1), set(committed(root))
    shutil.rmtree(root / "rounds" / "r0001")
    shutil.rmtree(folder)
    mirror.commit()
    assert set(committed(root)) == before
    assert store.rollout_rows(1) == rows and fetch_missing(folder) and (folder / "model.safetensors").exists()
    mirror.fetch_lost()
    assert store.read_note(1, "explore") == {"rows": 4}
    (root / "rounds" / "r0001" / "explore.json").unlink()
    mirror.take_over()
    assert store.read_note(1, "explore") == {"rows": 4}


def test_a_lost_note_that_is_withdrawn_does_not_come_back(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store = explored(root)
    (root / "rounds" / "r0001" / "explore.json").unlink()
    store.withdraw_note(1, "explore")
    mirror.take_over()
    assert not store.has_note(1, "explore")
    mirror.commit()
    assert "rounds/r0001/explore.json" not in committed(root) and store.withdraw_note(1, "explore") is None


def test_a_lost_ledger_is_fetched_and_not_made_of_the_files_that_are_here(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    second, mirror = drives(tmp_path, "second", url)
    (second / "rounds" / "r0001" / "files.json").unlink()
    assert len(ExperienceStore(second / "rounds").rollout_files(1)) == 1
    mirror.commit()
    assert len(ExperienceStore(drives(tmp_path, "third", url)[0] / "rounds").rollout_files(1)) == 1


def test_a_damaged_file_does_not_replace_the_stored_one_and_is_restored(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store, folder = explored(root), weights(root)
    mirror.finish()
    before, rows = committed(root), store.rollout_rows(1)
    file, note = store.rollout_files(1)[0], root / "rounds" / "r0001" / "explore.json"
    damaged = [file, note, folder / "model.safetensors", folder / "manifest.json"]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-3])
        mirror.commit()
    assert committed(root) == before
    assert store.restore(1, file) and store.restore(1, note) and not store.restore(1, file)
    assert restore_stored(folder) and (folder / "model.safetensors").read_text() == "weights"
    assert store.rollout_rows(1) == rows and store.read_note(1, "explore") == {"rows": 4}
    mirror.commit()
    assert committed(root) == before


def test_rows_that_are_written_again_replace_the_stored_ones(tmp_path: Path, url: str) -> None:
    root, _ = drives(tmp_path, "home", url)
    store = explored(root)
    store.write_rollouts(1, 0, rollouts(round=1)[:2])
    store.write_note(1, "explore", {"rows": 2})
    assert len(ExperienceStore(drives(tmp_path, "second", url)[0] / "rounds").rollout_rows(1)) == 2


def test_a_checkpoint_that_is_written_again_leaves_no_file_of_the_first_one(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    folder = weights(root, name="model-1-of-2.safetensors")
    mirror.commit()
    shutil.rmtree(folder)
    weights(root, "one file")
    write_text(folder.parent / "discarded" / "removed.global_step_1.model.safetensors.0123", "old")
    mirror.commit()
    inside = folder.relative_to(root)
    assert set(committed(root)) == {f"{inside}/manifest.json", f"{inside}/model.safetensors"}


def test_removals_between_two_commits_read_the_state_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    files = [explored(root, number).rollout_files(number)[0] for number in (1, 2, 3)]
    mirror.finish()  # its thread reads the state, too
    reads, read = list[StateFile](), StateFile._read

    def counted(self: StateFile) -> HomeState:
        reads.append(self)
        return read(self)

    monkeypatch.setattr(StateFile, "_read", counted)
    for file in files:
        with removing(file):
            file.unlink()
        assert mirror_of(root).stored(file) is None  # type: ignore[union-attr]
    assert len(reads) <= 1
    mirror.commit()
    assert not [path for path in committed(root) if path.endswith(".parquet")]


def test_a_kill_before_or_after_a_removal_neither_keeps_the_object_nor_removes_that_of_a_kept_file(
    tmp_path: Path, url: str
) -> None:
    root, _ = drives(tmp_path, "home", url)
    file = explored(root).rollout_files(1)[0]
    name = file.relative_to(root).as_posix()
    with pytest.raises(KeyboardInterrupt), removing(file):
        raise KeyboardInterrupt  # recorded, and still here
    HomeMirror(root).commit()
    assert name in committed(root)
    with pytest.raises(KeyboardInterrupt), removing(file):
        file.unlink()
        raise KeyboardInterrupt
    HomeMirror(root).take_over()
    assert not fetch_missing(file) or not file.exists()
    HomeMirror(root).commit()
    assert name not in committed(root)


def test_a_file_that_is_removed_while_it_is_uploaded_is_not_stored(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    folder, upload = weights(root, "w" * 100_000), mirror.remote.upload

    def removed(files: dict[str, Path]) -> None:
        upload(files)
        with removing(folder):
            shutil.rmtree(folder)

    monkeypatch.setattr(mirror.remote, "upload", removed)
    mirror.commit()
    assert committed(root) == {}


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_is_erased_while_it_is_fetched_or_restored_stays_erased(
    damaged: bool, dropped: bool, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    file, kept = explored(root).rollout_files(1)[0], explored(root, 2).rollout_files(2)[0]
    file.unlink()
    kept.unlink()
    if damaged:
        file.write_bytes(b"damaged")
    download = mirror.remote.download

    def erased(files: dict[Path, StoredFile]) -> None:
        if file in files:
            with removing(file):
                file.unlink(missing_ok=True)
            if dropped:
                HomeMirror(root).commit()
        download(files)

    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "download", erased)
        if damaged:
            mirror.restore(root / "rounds")
        else:
            mirror.fetch([file, kept])
    assert not file.exists() and kept.exists()
    store_changes(root, erase=True)
    assert not [path for path in committed(root) if path.startswith("rounds/r0001/rollouts")]


def test_an_erasure_leaves_no_replaced_object(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    write_text(root / "prompts" / "note.md", "a person")
    mirror.commit()
    write_text(root / "prompts" / "note.md", "erased")
    mirror.commit()
    objects = tmp_path / "bucket" / "project" / "files" / "prompts"
    assert sorted(file.read_text() for file in objects.iterdir()) == ["a person", "erased"]
    store_changes(root, erase=True)
    assert [file.read_text() for file in objects.iterdir()] == ["erased"]


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_driver_that_runs_is_not_replaced(tmp_path: Path, url: str) -> None:
    _, mirror = drives(tmp_path, "first", url)
    with mirror.driving(), pytest.raises(UserError, match="drives this project"):
        drives(tmp_path, "second", url)
    drives(tmp_path, "second", url)


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_daemon_that_ticks_is_not_replaced(tmp_path: Path, url: str) -> None:
    _, mirror = drives(tmp_path, "first", url)
    mirror.driven_for(60.0)
    with pytest.raises(UserError, match="or stop the daemon, before you continue"):
        drives(tmp_path, "second", url)
    mirror.driven_for(0.0)  # the last tick was long ago
    _, second = drives(tmp_path, "second", url)
    mirror.driven_for(60.0)  # a daemon that does not know yet that it was replaced
    second.remove_orphans()
    with second.driving(), pytest.raises(UserError, match="drives this project"):
        drives(tmp_path, "first", url)


def test_an_interrupted_take_over_is_continued(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = drives(tmp_path, "first", url)
    for number in (1, 2):
        explored(first, number)
    (root := tmp_path / "second").mkdir()
    mirror = open_mirror(root, url)
    download = mirror.remote.download

    def fails(files: dict[Path, StoredFile]) -> None:
        download(dict(list(files.items())[:2]))
        raise TransientError("the store cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "download", fails)
        with pytest.raises(TransientError):
            mirror.take_over()
    store = ExperienceStore(root / "rounds")
    with pytest.raises(StoreTakenError):
        store.write_note(1, "judge", {"rows": 4})  # the first home drives the project until the take-over is complete
    explored(first, 3)
    mirror.take_over()
    assert [store.read_note(number, "explore") for number in (1, 2, 3)] == [{"rows": 4}] * 3
    assert not (root / "store" / "replaced").exists()


def test_of_two_homes_that_take_over_at_the_same_time_one_is_refused(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explored(drives(tmp_path, "first", url)[0])
    (late := tmp_path / "late").mkdir()
    mirror = open_mirror(late, url)
    mirror.bring()
    winner, _ = drives(tmp_path, "winner", url)
    with pytest.raises(StoreTakenError, match="another home has continued"):
        mirror.claim()
    explored(winner, 2)
    mirror.take_over()
    assert ExperienceStore(late / "rounds").read_note(2, "explore") == {"rows": 4}


def test_a_home_whose_store_was_emptied_stores_everything_again(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    rows = explored(root).rollout_rows(1)
    mirror.finish()
    shutil.copytree(tmp_path / "bucket", tmp_path / "old")
    explored(root, 2)
    shutil.rmtree(tmp_path / "bucket")
    shutil.copytree(tmp_path / "old", tmp_path / "bucket")
    with pytest.raises(UserError, match="the store is an older copy"):
        mirror.take_over()
    shutil.rmtree(tmp_path / "bucket")
    mirror.take_over()
    store_changes(root)
    taken = ExperienceStore(drives(tmp_path, "second", url)[0] / "rounds")
    assert taken.rollout_rows(1) == rows and taken.read_note(2, "explore") == {"rows": 4}


@pytest.mark.parametrize("started_again", [False, True])
def test_an_older_home_that_was_restored_gets_what_was_stored_since(
    started_again: bool, tmp_path: Path, url: str
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store = explored(root)
    store.write_note(1, "judge", {"by": "first"})
    mirror.finish()
    shutil.copytree(root, tmp_path / "older")
    if started_again:
        mirror.take_over()
    store.withdraw_note(1, "judge")
    explored(root, 2)
    store.write_note(1, "explore", {"rows": 5})
    mirror.finish()
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "older", root)
    HomeMirror(root).take_over()
    assert store.read_note(1, "explore") == {"rows": 5} and store.has_note(2, "explore")
    assert not store.has_note(1, "judge") and store.damaged(2, digest=True) == []


def test_a_home_keeps_what_it_has_not_stored_yet_on_another_machine_and_after_a_kill(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "home", url)
    store = explored(root)
    mirror.finish()
    state = (root / "store" / "state.json").read_text()
    mirror.commit(["rounds"], {"rounds/r0001/judge.json": "{}"})
    (root / "store" / "state.json").write_text(state)  # killed between the commit and the state
    folder = weights(root)
    monkeypatch.setattr("socket.gethostname", lambda: "another-container")
    HomeMirror(root).take_over()
    assert (folder / "model.safetensors").exists() and store.has_note(1, "judge")
    state = (root / "store" / "state.json").read_text()
    HomeMirror(root).claim()
    document = {**json.loads(state), "claiming": json.loads((root / "store" / "state.json").read_text())["home"]}
    (root / "store" / "state.json").write_text(json.dumps(document))  # killed between the claim and the state
    HomeMirror(root).take_over()
    assert (folder / "model.safetensors").exists() and not (root / "store" / "replaced").exists()


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_copy_of_a_home_is_another_home(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    store = explored(first)
    shutil.copytree(first, tmp_path / "copy")
    drives(tmp_path, "copy", url)
    with pytest.raises(StoreTakenError):
        store.write_note(1, "judge", {"rows": 4})
    _, mirror = drives(tmp_path, "first", url)
    with mirror.driving(), pytest.raises(UserError, match="drives this project"):
        drives(tmp_path, "copy", url)


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_copy_of_a_home_changes_nothing_of_the_store_before_it_starts(tmp_path: Path, url: str) -> None:
    first, mirror = drives(tmp_path, "first", url)
    file = explored(first).rollout_files(1)[0]
    write_text(first / "prompts" / "note.md", "first")
    mirror.commit()
    write_text(first / "prompts" / "note.md", "second")
    mirror.commit()
    before = sorted((tmp_path / "bucket").rglob("*"))
    shutil.copytree(first, copy := tmp_path / "copy")
    store_changes(copy)
    mirror_of(copy).commit(grace_s=0.0)  # type: ignore[union-attr]
    with removing(copied := copy / file.relative_to(first)):
        copied.unlink()
    with pytest.raises(StoreTakenError, match="has not claimed the project"):
        store_changes(copy)
    assert sorted((tmp_path / "bucket").rglob("*")) == before
    with mirror.driving(), pytest.raises(UserError, match="drives this project"):
        drives(tmp_path, "copy", url)
    drives(tmp_path, "copy", url)
    assert fetch_missing(copied) and copied.read_bytes() == file.read_bytes()


def test_a_home_that_is_moved_is_the_same_home(tmp_path: Path, url: str) -> None:
    first, mirror = drives(tmp_path, "first", url)
    explored(first)
    first.rename(tmp_path / "moved")
    with mirror._driver.running():  # as seen by another process of this home
        HomeMirror(tmp_path / "moved").bring()
    explored(tmp_path / "moved", 2)
    assert not (tmp_path / "moved" / "store" / "replaced").exists()


@pytest.mark.parametrize("file", ["place.json", "state.json.lock"])
def test_a_folder_in_which_one_of_two_files_is_a_copy_is_another_home(file: str, tmp_path: Path, url: str) -> None:
    root, _ = drives(tmp_path, "home", url)
    shutil.copy(root / "store" / file, tmp_path / file)
    (tmp_path / file).replace(root / "store" / file)
    HomeMirror(root).take_over()
    with pytest.raises(StoreTakenError):
        shutil.copy(root / "store" / file, tmp_path / file)
        (tmp_path / file).replace(root / "store" / file)
        write_text(root / "prompts" / "note.md", "new")
        HomeMirror(root).commit()


def test_a_commit_does_not_count_a_file_as_stored_that_an_unrecorded_commit_dropped(tmp_path: Path, url: str) -> None:
    root, mirror = drives(tmp_path, "home", url)
    write_text(root / "prompts" / "note.md", "kept")
    mirror.commit()
    state = (root / "store" / "state.json").read_text()
    with removing(root / "prompts"):
        (root / "prompts" / "note.md").rename(tmp_path / "note.md")
    mirror.commit()
    (root / "store" / "state.json").write_text(state)  # killed between the commit and the state
    (tmp_path / "note.md").rename(root / "prompts" / "note.md")
    write_text(root / "prompts" / "other.md", "new")
    HomeMirror(root).commit()
    HomeMirror(root).commit()
    assert set(committed(root)) == {"prompts/note.md", "prompts/other.md"}


def test_the_first_start_of_a_project_with_rounds_is_continued_after_a_kill_within_its_claim(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = explored(root := tmp_path / "home").rollout_rows(1)
    mirror = open_mirror(root, url)
    mirror.bring()
    claim = commits.CommitLog.claim

    def killed(self: commits.CommitLog, known: commits.Committed) -> None:
        claim(self, known)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(commits.CommitLog, "claim", killed)
        patch.setattr(StateFile, "save", _first_only(StateFile.save))
        mirror.claim()
    HomeMirror(root).take_over()
    store_changes(root)
    assert ExperienceStore(drives(tmp_path, "second", url)[0] / "rounds").rollout_rows(1) == rows


def _first_only(save: Callable[[StateFile, HomeState], None]) -> Callable[[StateFile, HomeState], None]:
    """``save`` of a process that is killed before it saves a second time."""
    saved = list[HomeState]()

    def saving(self: StateFile, state: HomeState) -> None:
        if not saved:
            save(self, state)
        saved.append(state)

    return saving


def test_a_driver_that_was_replaced_does_not_end_the_sign_of_the_new_one(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, replaced = drives(tmp_path, "first", url)
    (second := tmp_path / "second").mkdir()
    mirror = open_mirror(second, url)
    mirror.bring()
    monkeypatch.setattr("rft_platform.object_store.driver_heartbeat._BEAT_S", 60.0)
    with replaced._driver.running():
        deadline = time.monotonic() + 30.0
        while b'"count": 2' not in (replaced.remote.read("driver.json") or b"") and time.monotonic() < deadline:
            time.sleep(0.01)
        mirror.claim()
        heartbeat = mirror.remote.read("driver.json")
    assert mirror.remote.read("driver.json") == heartbeat


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_home_does_not_take_its_own_late_heartbeat_for_the_end_of_another_driver(tmp_path: Path, url: str) -> None:
    _, replaced = drives(tmp_path, "first", url)
    _, mirror = drives(tmp_path, "second", url)
    for count in (0, 7):
        with mirror.driving():
            replaced._driver.write(count)
            with pytest.raises(UserError, match="drives this project"):
                replaced.bring()


@pytest.mark.usefixtures("slower_heartbeats")
def test_a_late_heartbeat_of_a_replaced_driver_does_not_end_that_of_the_new_one(tmp_path: Path, url: str) -> None:
    _, replaced = drives(tmp_path, "first", url)
    _, mirror = drives(tmp_path, "second", url)
    with mirror.driving():
        replaced._driver.write(7)
        deadline = time.monotonic() + 30.0
        while b'"count": 7' in (mirror.remote.read("driver.json") or b"") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(UserError, match="drives this project"):
            drives(tmp_path, "third", url)


def test_two_projects_do_not_mix_at_one_url(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    explored(tmp_path / "other")
    with pytest.raises(UserError, match="holds a project already"):
        drives(tmp_path, "other", url)
    with pytest.raises(UserError, match="this home is stored at"):
        open_mirror(first, url + "2")
