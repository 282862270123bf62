"""Outcomes of tasks up to a step of the project: how often each task was run and passed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One entry per task and round in which the task was run; tasks that no longer exist are omitted."""

    task_N: np.ndarray  # int64: index of the task
    round_N: np.ndarray  # int64
    runs_N: np.ndarray  # float64
    passes_N: np.ndarray  # float64

    @classmethod
    def of(cls, task_ids: Sequence[str], found: Sequence[tuple[str, int, float, float]]) -> "Outcomes":
        """Build from tuples ``(task_id, round, runs, passes)``."""
        index = {task_id: number for number, task_id in enumerate(task_ids)}
        known = [(index[task], *rest) for task, *rest in found if task in index]
        columns = np.array(known, np.float64).reshape(-1, 4).T
        return cls(columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2], columns[3])

    def totals(self, tasks: int, decay: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """float64 [tasks] each: passes and failures. A round has the weight ``decay ** (newest round - round)``."""
        weight_N = decay ** (self.round_N.max(initial=0) - self.round_N).astype(np.float64)
        passes_T = np.bincount(self.task_N, weights=weight_N * self.passes_N, minlength=tasks)
        runs_T = np.bincount(self.task_N, weights=weight_N * self.runs_N, minlength=tasks)
        return passes_T, runs_T - passes_T


class History(Protocol):
    """Source of the tasks' outcomes for selectors."""

    def outcomes(self, step: int, pass_reward: float) -> Outcomes:
        """The outcomes known when batch ``step`` of tasks was chosen; a run passes at ``pass_reward``.

        Later outcomes do not count, so repeated calls give the same result.
        """
        ...
