"""The copy of a home on an object store: commits, take-over by another home, fencing, what is fetched when."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import StoreTakenError, UserError
from rft_platform.common.files import write_json, write_text
from rft_platform.experience.queries import connect, find_row
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store import commits
from rft_platform.object_store.mirror import fetch_missing, mirror_of, open_mirror, store_changes
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


def test_removed_files_leave_the_store_but_files_that_were_never_here_stay(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    second, mirror = drives(tmp_path, "second", url)
    (second / "rounds" / "r0001" / "explore.json").unlink()
    mirror.commit()
    assert "rounds/r0001/explore.json" not in committed(second)
    assert "rounds/r0001/rollouts/batch-0000.parquet" in committed(second)


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


def test_a_driver_that_runs_is_not_replaced(tmp_path: Path, url: str) -> None:
    _, mirror = drives(tmp_path, "first", url)
    with mirror.driving(), pytest.raises(UserError, match="drives this project"):
        drives(tmp_path, "second", url)
    drives(tmp_path, "second", url)


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


def test_two_projects_do_not_mix_at_one_url(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    explored(first)
    explored(tmp_path / "other")
    with pytest.raises(UserError, match="holds a project already"):
        drives(tmp_path, "other", url)
    with pytest.raises(UserError, match="this home is stored at"):
        open_mirror(first, url + "2")
