"""Few requests for many small files: packs, their merging, and the index that finds the file of a row."""

from collections import Counter
from pathlib import Path

import pytest

from rft_platform.experience.queries import find_row
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store import packs, row_ids
from rft_platform.object_store.commits import EVERY
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile
from tests.experience.samples import rollouts
from tests.object_store.conftest import drives, explored


def pack_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "bucket" / "project" / packs.FOLDER).iterdir() if path.is_file()]


def test_contents_are_found_in_their_packs_and_a_pack_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "_FULL", 10)
    contents = {f"rounds/r0001/{size}.json": (bytes([size]) * size, str(size)) for size in (4, 6, 1, 0, 30, 2)}
    made = list(packs.packed(contents))
    assert [len(content) for _, content, _ in made] == [10, 1, 30, 2]
    for name, content, files in made:
        for path, file in files.items():
            assert (file.object, file.size, file.sha256) == (name, len(contents[path][0]), contents[path][1])
            assert content[file.offset : file.offset + file.size] == contents[path][0]
    assert [path for _, _, files in made for path in files] == list(contents)


def test_small_packs_are_merged_and_an_erasure_takes_those_with_gaps() -> None:
    def file(name: str, size: int) -> StoredFile:
        return StoredFile(f"{packs.FOLDER}/{name}", size, "")

    full = packs._FULL
    files = [file(f"a-{full}", full), file("b-10", 10), file("c-20", 12), StoredFile("files/rounds/r1/x", 5, "")]
    assert packs.to_merge(files, erase=False) == {f"{packs.FOLDER}/b-10", f"{packs.FOLDER}/c-20"}
    assert packs.to_merge(files, erase=True) == {f"{packs.FOLDER}/c-20"}
    assert packs.to_merge(files[:2], erase=False) == set()


def test_packs_of_many_commits_are_merged_and_a_take_over_takes_few_requests(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mirror = drives(tmp_path, "first", url)
    store = ExperienceStore(root / "rounds")
    for number in range(1, EVERY + 10):
        store.write_note(number, "progress", {"number": number})
    mirror.commit(grace_s=1e-9)
    assert len(pack_files(tmp_path)) == 1 + 11  # the notes of commits 2 to 49 in one; those of commits 50 to 60
    reads, read = Counter[str](), RemoteFiles._part

    def counted(self: RemoteFiles, name: str, start: int, end: int) -> bytes:
        reads[name] += 1
        return read(self, name, start, end)

    monkeypatch.setattr(RemoteFiles, "_part", counted)
    second, _ = drives(tmp_path, "second", url)
    assert len(reads) == reads.total() == 12
    taken = ExperienceStore(second / "rounds")
    assert [taken.read_note(number, "progress")["number"] for number in taken.rounds()] == store.rounds()


def test_a_merge_takes_files_that_are_not_here_from_the_store(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    row = explored(first).rollout_rows(1)[0]
    second, _ = drives(tmp_path, "second", url)
    store = ExperienceStore(second / "rounds")
    for number in range(2 * EVERY):
        store.write_note(1, "progress", {"number": number})
    third, _ = drives(tmp_path, "third", url)
    taken = ExperienceStore(third / "rounds")
    assert taken.read_note(1, "progress") == {"number": 2 * EVERY - 1}
    assert find_row(taken, row.row_id, ["run_id"]) == {"run_id": row.run_id}
    assert not taken.rollout_files(1)[0].exists()


def test_a_row_is_found_without_the_files_of_other_rows(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    for number in range(1, 5):
        rows = explored(first, number).rollout_rows(number)
    second, _ = drives(tmp_path, "second", url)
    for number in range(1, 4):  # nothing of these files can be read now
        for path in (tmp_path / "bucket" / "project" / "files" / "rounds" / f"r{number:04d}" / "rollouts").iterdir():
            path.unlink()
    store = ExperienceStore(second / "rounds")
    assert find_row(store, rows[0].row_id, ["round", "run_id"]) == {"round": 4, "run_id": rows[0].run_id}
    assert find_row(store, "no such row", ["round"]) is None
    assert not any(path.exists() for number in store.rounds() for path in store.rollout_files(number))


def test_the_index_is_that_of_the_newest_file(tmp_path: Path, url: str) -> None:
    first, _ = drives(tmp_path, "first", url)
    old = explored(first).rollout_rows(1)[0]
    second, _ = drives(tmp_path, "second", url)
    assert find_row(ExperienceStore(second / "rounds"), old.row_id, ["round"]) == {"round": 1}
    store = ExperienceStore(first / "rounds")
    drives(tmp_path, "first", url)
    again = rollouts(round=1)
    store.write_rollouts(1, 0, again[1:])
    store.write_note(1, "explore", {"rows": len(again) - 1})
    drives(tmp_path, "second", url)
    taken = ExperienceStore(second / "rounds")
    assert find_row(taken, old.row_id, ["round"]) is None
    assert find_row(taken, again[1].row_id, ["round"]) == {"round": 1}


def test_an_index_names_every_row_of_its_file(tmp_path: Path) -> None:
    store = ExperienceStore(tmp_path / "rounds")
    index = row_ids.index_of(store.write_rollouts(1, 0, rollouts(round=1)))
    assert index is not None and len(index) == 4 * len(rollouts(round=1))
    assert all(row_ids.may_hold(index, row.row_id) for row in rollouts(round=1))
    assert not any(row_ids.may_hold(index, f"other {number}") for number in range(1000))
    assert not row_ids.may_hold(b"", "any")
    (tmp_path / "broken").write_bytes(b"no rows")
    assert row_ids.index_of(tmp_path / "broken") is None
