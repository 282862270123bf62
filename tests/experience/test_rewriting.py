"""Compaction: other files, the same rows, the same identity; nobody who reads is disturbed."""

import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import StorageError
from rft_platform.experience.file_ledger import LEDGER, Ledger
from rft_platform.experience.maintenance import compact_round, sweep_round
from rft_platform.experience.queries import connect, find_row
from rft_platform.experience.store import ExperienceStore

from .samples import judged, rollouts


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    """One round of three batches, judged."""
    made = ExperienceStore(tmp_path / "rounds")
    for batch in range(3):
        made.write_rollouts(1, batch, rollouts(batch=batch, metrics={"score": float("nan")}))
    made.write_judged(1, "exact@1", judged(made.rollout_rows(1)))
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


def test_a_missing_column_is_refused(store: ExperienceStore) -> None:
    path = store.rollout_files(1)[0]
    pq.write_table(pq.read_table(path).drop_columns(["engine"]), path)
    with pytest.raises(StorageError, match="has no column engine, which schema version 1 has"):
        store.rollout_rows(1)
