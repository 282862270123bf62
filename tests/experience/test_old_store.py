"""A store of schema version 4 (column ``logprobs``): it is read, continued, upgraded, judged, traced and trained on."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rft_platform.common.files import write_json
from rft_platform.experience.maintenance import compact_round, upgrade_round
from rft_platform.experience.queries import connect, find_row
from rft_platform.experience.record import ROLLOUT_SCHEMA_VERSION
from rft_platform.experience.store import ExperienceStore
from rft_platform.model_registry.lineage import trace_checkpoint, trace_row
from rft_platform.training.data.rollout_rows import TrainingRows, read_rollouts

from .samples import judged, rollouts

OLD = Path(__file__).parent / "data" / "store-v4"  # one judged round of 2 batches, written by schema version 4


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    shutil.copytree(OLD, tmp_path / "rounds")
    return ExperienceStore(tmp_path / "rounds")


def training_rows(store: ExperienceStore) -> TrainingRows:
    files = [str(path) for path in store.rollout_files(1)]
    return read_rollouts(files, [str(path) for path in store.judged_files(1)], policy_gradient=True)


def test_rows_are_read_with_current_names(store: ExperienceStore) -> None:
    (first, *_) = store.rollout_files(1)
    assert "logprobs" in pq.read_schema(first).names and ROLLOUT_SCHEMA_VERSION > 4
    rows = store.rollout_rows(1)
    assert len(rows) == 24
    for row in rows:
        assert row.rollout_logprobs == [-0.5 - 0.125 * place for place in range(len(row.response_ids))]
    assert (rows[0].step_reward, rows[0].env_state_hash, rows[0].metrics) == (0.25, "e0", {"turns": 1.0})
    columns = store.read_rollouts(1, ["rollout_logprobs", "row_id"])
    assert columns.column_names == ["rollout_logprobs", "row_id"] and columns.num_rows == 24


def test_views_have_both_names(store: ExperienceStore) -> None:
    rows = {row.row_id: row.rollout_logprobs for row in store.rollout_rows(1)}
    new = rollouts(round=2)
    store.write_rollouts(2, 0, new)
    rows |= {row.row_id: row.rollout_logprobs for row in new}
    with connect(store) as connection:
        for view in ("rollouts", "experiences"):
            found = connection.execute(f"SELECT row_id, logprobs, rollout_logprobs FROM {view}").fetchall()
            assert {row: former for row, former, _ in found} == {row: current for row, _, current in found} == rows
    old = store.rollout_rows(1)[5]
    wanted = {"run_id": old.run_id, "rollout_logprobs": old.rollout_logprobs, "logprobs": old.rollout_logprobs}
    assert find_row(store, old.row_id, list(wanted)) == wanted


def test_a_round_continues_and_is_upgraded(store: ExperienceStore) -> None:
    digest, before = store.digest(1, verify=True), store.rollout_rows(1)
    assert len(upgrade_round(store, 1)) == 2
    assert {pq.read_schema(path).field("rollout_logprobs").name for path in store.rollout_files(1)}
    assert store.rollout_rows(1) == before and store.digest(1, verify=True) == digest
    assert upgrade_round(store, 1) == []


def test_old_and_new_batches_are_compacted_together(store: ExperienceStore) -> None:
    before = store.rollout_rows(1)
    store.write_rollouts(1, 2, rollouts(batch=2))
    compact_round(store, 1)
    assert store.rollout_rows(1) == before + rollouts(batch=2)


def test_a_round_is_judged_again(store: ExperienceStore) -> None:
    store.write_judged(1, "second", judged(store.rollout_rows(1), "second"))
    with connect(store) as connection:
        found = connection.execute("SELECT DISTINCT judge_version, count(*) FROM experiences GROUP BY 1").fetchall()
    assert found == [("second", 24)]


def test_training_reads_the_same_numbers_from_old_and_upgraded_files(store: ExperienceStore) -> None:
    old = training_rows(store)
    upgrade_round(store, 1)
    new = training_rows(store)
    assert len(old.samples) == len(new.samples) == 24
    for one, other in zip(old.samples, new.samples, strict=True):
        for name in ("token_ids", "loss_mask", "rollout_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
        assert (one.row_id, one.advantage, one.group) == (other.row_id, other.advantage, other.group)


def test_rows_and_checkpoints_are_traced(store: ExperienceStore, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "global_step_3"
    lineage = {"round": 1, "judge_version": "judge", "data_digest": store.digest(1), "base_model": "base"}
    manifest = {"policy_version": 3, "parent": str(tmp_path / "base"), "parent_version": 0, "lineage": lineage}
    write_json(checkpoint / "manifest.json", {**manifest, "weights_digest": "w"})
    (tmp_path / "base").mkdir()
    (training,) = trace_checkpoint(checkpoint, store).trainings
    assert (training.data_unchanged, training.rows_trained) == (True, 24)
    upgrade_round(store, 1)
    row = store.rollout_rows(1)[0]
    trace = trace_row(row.row_id, store, tmp_path / "checkpoints")
    assert (trace.run_id, [used.policy_version for used in trace.trained]) == (row.run_id, [3])
