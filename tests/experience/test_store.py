"""The store: whole files or none, re-runs change nothing, counts come from footers."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import StorageError
from rft_platform.experience.store import ExperienceStore

from .samples import judged, rollouts


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore(tmp_path / "rounds")


def test_batches_are_read_in_order(store: ExperienceStore) -> None:
    late, early = rollouts(batch=10), rollouts(batch=2)
    store.write_rollouts(1, 10, late)
    path = store.write_rollouts(1, 2, early)
    assert path == store.root / "r0001" / "rollouts" / "batch-0002.parquet"
    assert store.rollout_rows(1) == early + late
    assert store.batches(1) == [2, 10] and store.rounds() == [1]
    assert store.read_rollouts(1, ["row_id", "response_ids"]).column_names == ["row_id", "response_ids"]


def test_an_empty_store_is_no_error(store: ExperienceStore) -> None:
    assert (store.rounds(), store.rollout_files(1), store.rollout_rows(1), store.count_rollouts(1)) == ([], [], [], 0)
    assert (store.judged_file(1), store.judged_rows(1), store.count_judged(1)) == (None, [], 0)
    assert store.read_rollouts(1, ["round"]).column_names == ["round"]
    assert store.read_note(1, "explore") is None


def test_a_rerun_replaces_its_batch(store: ExperienceStore) -> None:
    for _ in range(2):
        store.write_rollouts(1, 0, rollouts())
    assert store.count_rollouts(1) == 4
    digest = store.digest(1)
    store.write_rollouts(1, 0, rollouts())
    assert store.digest(1) == digest
    store.write_rollouts(1, 0, rollouts(policy_version=5))
    assert store.digest(1) != digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_logprobs": [-0.5]}, "1 rollout_logprobs for 3 response_ids"),
        ({"loss_mask": []}, "0 loss_mask for 3 response_ids"),
        ({"round": 2}, "belongs to round 2, written to round 1"),
        ({"row_id": "same"}, "row same: occurs twice"),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_written(
    store: ExperienceStore, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        store.write_rollouts(1, 0, rollouts(**changes))
    assert list(store.root.rglob("*.*")) == []


def test_a_row_is_in_at_most_one_batch(store: ExperienceStore) -> None:
    store.write_rollouts(1, 0, rollouts())
    with pytest.raises(ValueError, match="occurs twice"):
        store.write_rollouts(1, 1, rollouts())
    assert store.batches(1) == [0]


def test_a_half_written_file_is_never_seen(store: ExperienceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_rollouts(1, 0, rollouts())
    folder = store.root / "r0001" / "rollouts"
    (folder / ".batch-0001.parquet.0a1b2c3d.tmp").write_bytes(b"PAR1 half")
    assert store.count_rollouts(1) == len(store.rollout_rows(1)) == 4

    def dies(table: Any, where: Path, **options: Any) -> None:
        where.write_bytes(b"PAR1 half")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", dies)
    with pytest.raises(OSError, match="no space"):
        store.write_rollouts(1, 0, rollouts(policy_version=5))
    monkeypatch.undo()
    assert {row.policy_version for row in store.rollout_rows(1)} == {4}
    assert [path.name for path in folder.iterdir() if path.suffix != ".tmp"] == ["batch-0000.parquet"]


def test_a_corrupt_file_is_named(store: ExperienceStore) -> None:
    path = store.write_rollouts(1, 0, rollouts())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StorageError, match=r"r0001/rollouts/batch-0000\.parquet"):
        store.rollout_rows(1)


def test_counts_need_the_ledger_alone(store: ExperienceStore) -> None:
    store.write_rollouts(1, 0, rollouts(50, 8)).write_bytes(b"")
    assert store.count_rollouts(1) == 400


def test_judgements_stand_side_by_side(store: ExperienceStore) -> None:
    rows = rollouts()
    store.write_rollouts(1, 0, rows)
    store.write_judged(1, "exact@1", judged(rows))
    other = "math/verify: v2?"
    path = store.write_judged(1, other, judged(rows, other), make_current=False)
    assert path.parent == store.root / "r0001" / "judged" and len(store.judged_files(1)) == 2
    assert store.judge_version(1) == "exact@1" and store.judged_rows(1) == judged(rows)
    assert store.judged_rows(1, other) == judged(rows, other)
    store.write_judged(1, other, judged(rows, other))
    assert store.judge_version(1) == other and store.judged_file(1) == path
    assert store.count_judged(1) == store.count_judged(1, "exact@1") == 4
    assert store.judged_file(1, "unknown") is None


def test_the_digest_of_the_rollouts_is_that_of_the_round_before_its_judgement(store: ExperienceStore) -> None:
    store.write_rollouts(1, 0, rollouts())
    before = store.digest(1)
    store.write_judged(1, "exact@1", judged(store.rollout_rows(1)))
    assert store.rollouts_digest(1) == before != store.digest(1)


def test_bad_judgements_are_refused(store: ExperienceStore) -> None:
    rows = rollouts()
    with pytest.raises(ValueError, match="expected 'new'"):
        store.write_judged(1, "new", judged(rows, "old"))
    with pytest.raises(ValueError, match="occurs twice"):
        store.write_judged(1, "v", judged(rows + rows, "v"))
    store.write_judged(1, "v", judged(rows, "v")).unlink()
    with pytest.raises(StorageError, match=r"v\.parquet: named by current\.json but missing"):
        store.judged_rows(1)


def test_notes(store: ExperienceStore) -> None:
    store.write_note(0, "policy", {"folder": "/models/base"})
    assert store.read_note(0, "policy") == {"folder": "/models/base"}
    with pytest.raises(ValueError, match="note name"):
        store.write_note(0, "../escape", {})
    (store.root / "r0000" / "policy.json").write_text("{half")
    with pytest.raises(StorageError, match=r"policy\.json"):
        store.read_note(0, "policy")
