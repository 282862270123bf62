"""Compaction and upgrade: other files, the same rows, the same identity; nobody who reads is disturbed."""

import shutil
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import StorageError
from rft_platform.experience.file_ledger import LEDGER, Ledger
from rft_platform.experience.maintenance import compact_round, sweep_round, upgrade_round
from rft_platform.experience.queries import connect, find_row
from rft_platform.experience.record import ROLLOUT_SCHEMA_VERSION
from rft_platform.experience.store import ExperienceStore

from .samples import judged, rollouts

OLD_FILE = Path(__file__).parent / "data" / "rollouts-v1.parquet"  # rows of ``rollouts()``, written by version 1


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    """One round of three batches, judged."""
    made = ExperienceStore(tmp_path / "rounds")
    for batch in range(3):
        made.write_rollouts(1, batch, rollouts(batch=batch, metrics={"score": float("nan")}))
    made.write_judged(1, "exact@1", judged(made.rollout_rows(1)))
    return made


@pytest.fixture
def old_store(tmp_path: Path) -> ExperienceStore:
    """A round as version 1 of the schema left it, without a ledger."""
    made = ExperienceStore(tmp_path / "old")
    folder = made.round_folder(1) / "rollouts"
    folder.mkdir(parents=True)
    shutil.copy(OLD_FILE, folder / "batch-0000.parquet")
    return made


def test_compaction_keeps_rows_order_and_digest(store: ExperienceStore) -> None:
    ids, digest = store.read_rollouts(1, ["row_id"]), store.digest(1)
    before = store.rollout_files(1)
    (done,) = compact_round(store, 1)
    (path,) = store.rollout_files(1)
    assert (done.rows, len(done.replaced), store.round_folder(1) / done.by) == (12, 3, path)
    assert store.read_rollouts(1, ["row_id"]).equals(ids)
    assert (store.digest(1, verify=True), store.batches(1), store.count_rollouts(1)) == (digest, [0, 1, 2], 12)
    assert all(file.exists() for file in before)  # for whoever holds their names
    assert sweep_round(store, 1, grace_s=60) == 0 and all(file.exists() for file in before)
    assert sweep_round(store, 1, grace_s=0) > 0 and not any(file.exists() for file in before)
    assert compact_round(store, 1) == [] and sweep_round(store, 1, grace_s=0) == 0
    assert find_row(store, ids["row_id"][7].as_py(), ["round"]) == {"round": 1}


@pytest.mark.parametrize("ledger_of_before", [False, True], ids=["new", "still listed as replaced"])
def test_rows_explored_again_under_a_replaced_name_stay(store: ExperienceStore, ledger_of_before: bool) -> None:
    replaced = store.rollout_files(1)
    compact_round(store, 1)
    store.set_aside(1, store.rollout_files(1)[0], "was changed after it was written")
    for batch in range(2):
        store.write_rollouts(1, batch, rollouts(batch=batch))
    with store.ledger(1).change() as contents:
        assert list(contents.superseded) == ["rollouts/batch-0002.parquet"]
        if ledger_of_before:
            contents.superseded["rollouts/batch-0000.parquet"] = 0.0
    assert sweep_round(store, 1, grace_s=0) > 0
    assert [file.exists() for file in replaced] == [True, True, False]
    assert store.batches(1) == [0, 1] and store.damaged(1, digest=True) == []


def test_a_dry_run_changes_nothing(store: ExperienceStore) -> None:
    ledger = (store.round_folder(1) / LEDGER).read_text()
    (planned,) = compact_round(store, 1, dry_run=True)
    assert (planned.rows, planned.bytes_after) == (12, None)
    assert (store.round_folder(1) / LEDGER).read_text() == ledger and len(store.rollout_files(1)) == 3


def test_a_damaged_round_is_left_as_it_is(store: ExperienceStore) -> None:
    path = store.rollout_files(1)[1]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"batch-0001\.parquet: was changed after it was written"):
        compact_round(store, 1)
    assert len(store.rollout_files(1)) == 3


def test_a_crash_before_the_ledger_is_written_changes_nothing(
    store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Ledger, contents: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        compact_round(store, 1)
    monkeypatch.undo()
    assert store.batches(1) == [0, 1, 2] and len(store.rollout_rows(1)) == 12  # the merged file has not landed
    (done,) = compact_round(store, 1)
    assert done.rows == 12 and len(store.rollout_rows(1)) == 12


def test_a_lost_ledger_does_not_double_compacted_rows(store: ExperienceStore) -> None:
    compact_round(store, 1)
    (store.round_folder(1) / LEDGER).unlink()
    assert store.count_rollouts(1) == 12 and len(store.rollout_files(1)) == 1


def test_readers_are_not_disturbed(store: ExperienceStore) -> None:
    stop, wrong = threading.Event(), list[int]()

    def read() -> None:
        while not stop.is_set():
            wrong.extend({store.read_rollouts(1, ["row_id"]).num_rows} - {12})

    reader = threading.Thread(target=read)
    with connect(store) as connection:  # it named its files before
        reader.start()
        compact_round(store, 1)
        assert connection.execute("SELECT count(*) FROM experiences WHERE reward IS NOT NULL").fetchall() == [(12,)]
    stop.set()
    reader.join()
    assert wrong == []


def test_settled_rows_take_no_new_batch(store: ExperienceStore) -> None:
    compact_round(store, 1)
    with pytest.raises(StorageError, match="rollouts were compacted"):
        store.write_rollouts(1, 3, rollouts(batch=3))


def test_files_of_version_1_are_read_as_the_current_schema(old_store: ExperienceStore) -> None:
    assert pq.read_schema(OLD_FILE).metadata[b"rft.schema_version"] == b"1" and ROLLOUT_SCHEMA_VERSION > 1
    assert old_store.rollout_rows(1) == rollouts()  # attempt: not recorded
    assert old_store.read_rollouts(1, ["attempt", "row_id"])["attempt"].null_count == 4
    old_store.write_rollouts(2, 0, rollouts(round=2, attempt=1))
    with connect(old_store) as connection:
        found = connection.execute("SELECT round, count(*), count(attempt) FROM rollouts GROUP BY round ORDER BY round")
        assert found.fetchall() == [(1, 4, 0), (2, 4, 4)]
    with connect(old_store, rounds=[1]) as connection:  # no file of the current version at all
        assert connection.execute("SELECT max(attempt), count(*) FROM rollouts").fetchall() == [(None, 4)]


def test_upgrade_rewrites_old_files_once(old_store: ExperienceStore) -> None:
    digest = old_store.digest(1)
    (done,) = upgrade_round(old_store, 1)
    assert (done.replaced, done.rows) == (("rollouts/batch-0000.parquet",), 4)
    (path,) = old_store.rollout_files(1)
    assert pq.read_schema(path).metadata[b"rft.schema_version"] == str(ROLLOUT_SCHEMA_VERSION).encode()
    assert old_store.digest(1, verify=True) == digest and old_store.rollout_rows(1) == rollouts()
    assert upgrade_round(old_store, 1) == []


def test_old_and_new_batches_compact_together(old_store: ExperienceStore) -> None:
    old_store.write_rollouts(1, 1, rollouts(batch=1, attempt=0))
    (done,) = compact_round(old_store, 1)
    assert done.rows == 8
    assert [row.attempt for row in old_store.rollout_rows(1)] == [None] * 4 + [0] * 4


def test_a_missing_column_of_the_files_own_version_is_refused(old_store: ExperienceStore) -> None:
    (path,) = old_store.rollout_files(1)
    table = pq.read_table(path).drop_columns(["engine"])
    pq.write_table(table, path)
    with pytest.raises(StorageError, match="has no column engine, which schema version 1 has"):
        old_store.rollout_rows(1)
