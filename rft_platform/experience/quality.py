"""Checks of a round's data: pure functions from tables to small results, which the asset checks report."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rft_platform.common.errors import NAMED
from rft_platform.config.rollout_limits import GroupPolicy, may_train
from rft_platform.experience.schema import list_lengths

#: Columns that ``check_rollouts`` reads.
ROLLOUT_COLUMNS = [
    "row_id",
    "group_id",
    "run_id",
    "policy_version",
    "response_ids",
    "rollout_logprobs",
    "loss_mask",
    "truncated",
]
#: Columns that ``check_judged`` reads.
JUDGED_COLUMNS = ["row_id", "group_id", "run_id", "step", "reward", "advantage", "dropped_by", "judge_error"]


@dataclass(frozen=True, slots=True)
class RolloutQuality:
    """Defects of a round's rollouts; each tuple names the first few rows or groups with this defect."""

    rows: int
    unequal_lengths: tuple[str, ...]  # row ids whose ids, log-probs and mask differ in length
    bad_logprobs: tuple[str, ...]  # row ids with a log-prob that is NaN, infinite or above 0
    duplicate_rows: tuple[str, ...]  # row ids that occur twice
    empty_responses: tuple[str, ...]  # row ids without a token
    incomplete_groups: tuple[str, ...]  # group ids whose number of runs the group policy does not permit
    policy_versions: tuple[int, ...]  # ascending
    truncated_share: float

    @property
    def sound(self) -> bool:
        """Whether the rows can be trained on. Group sizes and policy versions are not part of it: see their checks."""
        return not (self.unequal_lengths or self.bad_logprobs or self.duplicate_rows or self.empty_responses)


@dataclass(frozen=True, slots=True)
class JudgedQuality:
    """Defects of a round's judgement, and the shares of rows and groups that give no learning signal."""

    rows: int
    non_finite: tuple[str, ...]  # ids of kept rows with a missing or infinite reward or advantage
    unjudged: tuple[str, ...]  # row ids of rollouts without a judgement
    orphans: tuple[str, ...]  # row ids of judgements without a rollout
    judge_errors: int  # runs on which the judge failed
    first_judge_errors: tuple[str, ...]  # ids of rows of these runs; clients choose the ids of production runs
    dropped_share: float  # rows that a filter excluded from training
    zero_variance_share: float  # groups whose runs all have the same reward

    @property
    def sound(self) -> bool:
        """Whether every rollout has exactly one finite judgement."""
        return not (self.non_finite or self.unjudged or self.orphans)


def check_rollouts(table: pa.Table, repeat_times: int | None, policy: GroupPolicy = "complete") -> RolloutQuality:
    """Check rollouts (at least ``ROLLOUT_COLUMNS``); every group should have ``repeat_times`` runs.

    ``policy`` defines whether a group with fewer runs may train. None: a group may have any number of runs.
    """
    ids = table["row_id"]
    lengths = list_lengths(table["response_ids"])
    unequal = (list_lengths(table["rollout_logprobs"]) != lengths) | (list_lengths(table["loss_mask"]) != lengths)
    counts = table.group_by("group_id").aggregate([("run_id", "count_distinct")]).to_pylist()
    runs = {group["group_id"]: group["run_id_count_distinct"] for group in counts}
    incomplete = sorted(
        name for name, count in runs.items() if repeat_times is not None and not may_train(count, repeat_times, policy)
    )
    return RolloutQuality(
        rows=table.num_rows,
        unequal_lengths=_named(ids, unequal),
        bad_logprobs=_named(ids, _rows_with_bad_logprob(table["rollout_logprobs"])),
        duplicate_rows=_duplicates(ids),
        empty_responses=_named(ids, lengths == 0),
        incomplete_groups=tuple(incomplete[:NAMED]),
        policy_versions=tuple(sorted(pc.unique(table["policy_version"]).to_pylist())),
        truncated_share=_share(table["truncated"]),
    )


def check_judged(judged: pa.Table, rollouts: pa.Table) -> JudgedQuality:
    """Check a judgement (at least ``JUDGED_COLUMNS``) against the ``row_id`` column of its rollouts."""
    numbers = (pc.fill_null(pc.is_finite(judged[name]), False) for name in ("reward", "advantage"))
    finite = pc.and_(*numbers)
    # A failed judgement is a dropped row whose reward is null.
    unusable = pc.invert(pc.or_(finite, pc.is_valid(judged["dropped_by"])))
    ids, wanted = judged["row_id"], rollouts["row_id"]
    failed = judged.filter(pc.is_valid(judged["judge_error"]))
    return JudgedQuality(
        rows=judged.num_rows,
        non_finite=tuple(ids.filter(unusable).slice(0, NAMED).to_pylist()),
        unjudged=_missing(wanted, ids),
        orphans=_missing(ids, wanted),
        judge_errors=len(failed["run_id"].unique()),
        first_judge_errors=tuple(failed["row_id"].slice(0, NAMED).to_pylist()),
        dropped_share=_share(pc.is_valid(judged["dropped_by"])),
        zero_variance_share=zero_variance_share(judged),
    )


def zero_variance_share(judged: pa.Table) -> float:
    """Share of groups whose runs all have the same reward; the reward of a run is that of its last step."""
    if judged.num_rows == 0:
        return 0.0
    last = judged.select(["group_id", "run_id", "step", "reward"]).sort_by("step")
    runs = last.group_by(["group_id", "run_id"], use_threads=False).aggregate([("reward", "last")])
    spread = runs.group_by("group_id").aggregate([("reward_last", "min_max")])["reward_last_min_max"].combine_chunks()
    return _share(pc.equal(spread.field("min"), spread.field("max")))


def _rows_with_bad_logprob(column: pa.ChunkedArray) -> np.ndarray:
    """True for rows with a log-prob that is not in (-inf, 0], with a tolerance of 1e-4 for rounding errors."""
    values = np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks] or [np.empty(0, np.float32)])
    bad = ~(np.isfinite(values) & (values <= 1e-4))
    rows = np.repeat(np.arange(len(column)), list_lengths(column))
    return np.bincount(rows[bad], minlength=len(column)).astype(bool)


def _named(ids: pa.ChunkedArray, offending: np.ndarray) -> tuple[str, ...]:
    return tuple(ids[int(index)].as_py() for index in np.flatnonzero(offending)[:NAMED])


def _duplicates(ids: pa.ChunkedArray) -> tuple[str, ...]:
    counts = pc.value_counts(ids)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    return tuple(repeated.slice(0, NAMED).to_pylist())


def _missing(ids: pa.ChunkedArray, known: pa.ChunkedArray) -> tuple[str, ...]:
    absent = ids.filter(pc.invert(pc.is_in(ids, value_set=known.combine_chunks())))
    return tuple(absent.slice(0, NAMED).to_pylist())


def _share(flags: pa.ChunkedArray) -> float:
    return float(pc.mean(flags).as_py() or 0.0)
