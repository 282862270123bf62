"""Convert stored rows and their judgements to the columns that operators use, and back."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rft_platform.experience.record import RolloutRow
from rft_platform.judging.operators.experiences import Experiences


class Judgement(Protocol):
    """The judgement of a run on which the judge did not fail."""

    @property
    def run_id(self) -> str:
        """Id of the run."""

    @property
    def reward(self) -> float:
        """Reward of the run."""

    @property
    def parts(self) -> Mapping[str, float]:
        """The named parts of the reward."""


def experiences_of(
    rows: Sequence[RolloutRow], judgements: Sequence[Judgement], wanted_groups: int | None = None
) -> Experiences:
    """Return the columns of ``rows``; rows and runs keep the order of ``rows`` and of ``judgements``.

    Every row must belong to a run of ``judgements``.
    """
    run = {judgement.run_id: index for index, judgement in enumerate(judgements)}
    last: dict[str, RolloutRow] = {}
    metrics: list[dict[str, float]] = [{} for _ in judgements]
    for row in rows:
        metrics[run[row.run_id]].update(row.call.metrics)
        if row.run_id not in last or row.step >= last[row.run_id].step:
            last[row.run_id] = row
    of_run = [last[judgement.run_id] for judgement in judgements]
    task = {row.group_id: row.task_id for row in of_run}  # in order of appearance
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
        group_R=np.array([group[row.group_id] for row in of_run], np.int64),
        empty_R=np.array([_is_empty(row) for row in of_run], bool),
        judged_R=reward,
        reward_R=reward,
        kept_R=np.ones(len(judgements), bool),
        parts=_columns([judgement.parts for judgement in judgements]),
        metrics=_columns(metrics),
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
