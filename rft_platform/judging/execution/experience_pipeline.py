"""The experience pipeline: apply operators in order, and record what each of them drops and changes.

``experiences_of`` converts stored rows and their judgements to the columns that operators use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rft_platform.common.errors import UserCodeError, UserError, some
from rft_platform.common.fault_classification import described, user_place
from rft_platform.common.files import digest_json
from rft_platform.config.schema.rft_config import OperatorConfig
from rft_platform.experience.record import RolloutRow
from rft_platform.judging.execution.judge_version import judge_version
from rft_platform.judging.operators.registry import Change, Experiences, OperatorFunction, find_operator
from rft_platform.judging.types import RunJudgement

RunMetrics = Mapping[str, Mapping[str, float]]
"""Metrics of each run, by its id."""


def metrics_of_runs(rows: Iterable[RolloutRow]) -> dict[str, dict[str, float]]:
    """The metrics of the runs that ``rows`` record, whatever policy was called: a run's own are in its last row."""
    metrics: dict[str, dict[str, float]] = {}
    for row in rows:
        metrics.setdefault(row.run_id, {}).update(row.call.metrics)
    return metrics


def last_rows(rows: Iterable[RolloutRow]) -> list[RolloutRow]:
    """Return the row of each run that has the run's output and reward: the last choice of the run's last call.

    ``rows`` are in stored order.
    """
    last: dict[str, RolloutRow] = {}
    for row in rows:
        if row.run_id not in last or row.step >= last[row.run_id].step:
            last[row.run_id] = row
    return list(last.values())


def experiences_of(
    rows: Sequence[RolloutRow],
    judgements: Sequence[RunJudgement],
    wanted_groups: int | None = None,
    metrics: RunMetrics | None = None,
) -> Experiences:
    """Return the columns of ``rows``; rows and runs keep the order of ``rows`` and of ``judgements``.

    Every row must belong to a run of ``judgements``. ``metrics``: those of the runs, if ``rows`` are only the rows of
    one policy.
    """
    metrics = metrics_of_runs(rows) if metrics is None else metrics
    run = {judgement.run_id: index for index, judgement in enumerate(judgements)}
    last = {row.run_id: row for row in last_rows(rows)}
    ends = [last[judgement.run_id] for judgement in judgements]
    task = {row.group_id: row.task_id for row in ends}  # in order of appearance
    group = {name: index for index, name in enumerate(task)}
    reward = np.array([judgement.reward for judgement in judgements], np.float64)
    return Experiences(
        run_N=np.array([run[row.run_id] for row in rows], np.int64),
        step_N=np.array([row.step for row in rows], np.int64),
        length_N=np.array([len(row.call.response_ids) for row in rows], np.int64),
        truncated_N=np.array([row.truncated for row in rows], bool),
        kept_N=np.ones(len(rows), bool),
        run_ids=tuple(run),
        group_ids=tuple(group),
        task_ids=tuple(task.values()),
        group_R=np.array([group[row.group_id] for row in ends], np.int64),
        empty_R=np.array([_is_empty(row) for row in ends], bool),
        judged_R=reward,
        reward_R=reward,
        kept_R=np.ones(len(judgements), bool),
        parts=_columns([judgement.parts for judgement in judgements]),
        metrics=_columns([metrics[name] for name in run]),
        wanted_groups=wanted_groups,
    )


def parts_of(experiences: Experiences, run: int) -> dict[str, float]:
    """The parts of a run's reward; parts that only other runs have are left out."""
    return {name: float(values[run]) for name, values in experiences.parts.items() if not np.isnan(values[run])}


def _columns(values: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for found in values for name in found)
    return {name: np.array([found.get(name, np.nan) for found in values], np.float64) for name in names}


def _is_empty(row: RolloutRow) -> bool:
    content = row.call.response.get("content")
    return not (content.strip() if isinstance(content, str) else content) and not row.call.response.get("tool_calls")


JUDGED = "judged"  #: reward part with the judge's own reward; present if an operator has changed the reward


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with its options."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """The effect of one operator. A group counts as kept if one of its runs is kept."""

    name: str
    rows_in: int
    rows_out: int
    runs_in: int
    runs_out: int
    groups_in: int
    groups_out: int
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Processed:
    """Experiences after the pipeline. ``dropped_N`` names the operator that keeps a row from training, or is None."""

    experiences: Experiences
    dropped_N: Sequence[str | None]
    reports: tuple[OperatorReport, ...] = ()

    @property
    def trained_groups(self) -> int:
        """Number of groups with at least one row that is trained on."""
        kept = self.experiences.run_N[self.experiences.kept_N]
        return len(np.unique(self.experiences.group_R[kept]))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Operators in the order of application."""

    operators: tuple[Operator, ...] = ()
    functions: tuple[OperatorFunction, ...] = ()

    @classmethod
    def of(cls, operators: Iterable[Operator | OperatorConfig]) -> "Pipeline":
        """Look up every operator. Raises UserError for unknown names and options that do not fit."""
        named = tuple(Operator(entry.name, dict(entry.args)) for entry in operators)
        return cls(named, tuple(find_operator(entry.name, entry.args) for entry in named))

    @property
    def version(self) -> str | None:
        """Digest of names, options and code of all operators; None without operators."""
        if not self.operators:
            return None
        pairs = zip(self.operators, self.functions, strict=True)
        return digest_json([judge_version([(one.name, code, dict(one.args), 1.0)]) for one, code in pairs])[:16]

    def apply(self, experiences: Experiences) -> Processed:
        """Apply every operator to the result of the one before.

        Raises UserCodeError if an operator fails or returns something that does not fit.
        """
        dropped = np.full(len(experiences.run_N), None, object)
        reports = []
        for entry, function in zip(self.operators, self.functions, strict=True):
            change = _call(entry, function, experiences)
            after, gone_N = _changed(entry.name, experiences, change)
            dropped[gone_N] = entry.name
            reports.append(_report(entry.name, experiences, after, change.facts))
            experiences = after
        bad = np.flatnonzero(experiences.kept_R & ~np.isfinite(experiences.reward_R))
        if len(bad):
            named = some([experiences.run_ids[run] for run in bad.tolist()])
            raise UserCodeError(
                f"the experience operators left {len(bad)} runs with a reward that is not finite ({named}): put "
                "invalid_filter last, or correct the operator"
            )
        return Processed(experiences, dropped.tolist(), tuple(reports))


def _call(entry: Operator, function: OperatorFunction, experiences: Experiences) -> Change:
    try:
        change = function(experiences, **entry.args)
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        location = user_place(error)
        cause = f"{described(error)}{f' ({location})' if location else ''}"
        raise UserCodeError(f"experience operator {entry.name!r} failed: {cause}") from error
    if not isinstance(change, Change):
        raise UserCodeError(f"experience operator {entry.name!r} returned {type(change).__name__}, expected a Change")
    return change


def _changed(name: str, before: Experiences, change: Change) -> tuple[Experiences, np.ndarray]:
    """Apply a change; return the changed experiences and bool [N], True for rows that it removes from training."""
    rows, runs = len(before.run_N), len(before.run_ids)
    reward_R = _column(name, "reward", change.reward, before.reward_R, runs)
    drop_R = _column(name, "drop", change.drop, np.zeros(runs, bool), runs) & before.kept_R
    mask_N = _column(name, "mask", change.mask, np.zeros(rows, bool), rows)
    gone_N = before.kept_N & (mask_N | drop_R[before.run_N])
    parts = {part: _column(name, part, values, before.reward_R, runs) for part, values in change.parts.items()}
    after = replace(
        before,
        reward_R=reward_R,
        kept_R=before.kept_R & ~drop_R,
        kept_N=before.kept_N & ~gone_N,
        parts={**before.parts, **parts},
    )
    return after, gone_N


def _column(name: str, what: str, values: np.ndarray | None, default: np.ndarray, count: int) -> np.ndarray:
    if values is None:
        return default
    array = np.asarray(values)
    if array.shape != (count,):
        raise UserCodeError(
            f"experience operator {name!r}: {what} has the shape {array.shape}, expected {(count,)}: one value a "
            f"{'row' if what == 'mask' else 'run'}"
        )
    return array.astype(default.dtype)


def _report(name: str, before: Experiences, after: Experiences, facts: Mapping[str, float]) -> OperatorReport:
    return OperatorReport(
        name=name,
        rows_in=int(before.kept_N.sum()),
        rows_out=int(after.kept_N.sum()),
        runs_in=int(before.kept_R.sum()),
        runs_out=int(after.kept_R.sum()),
        groups_in=len(np.unique(before.group_R[before.kept_R])),
        groups_out=len(np.unique(after.group_R[after.kept_R])),
        facts={key: float(value) for key, value in facts.items()},
    )
