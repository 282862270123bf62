"""Registry of advantage functions: their inputs and outputs, and the entry point ``compute_advantages``.

``run_outcomes`` maps rows to runs: a run's outcome is the reward of its last step, and each run counts once in its
group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.common.errors import UserError

AdvantageFunction = Callable[..., np.ndarray]
"""``(rewards_N, group_N, run_N, step_N, *, options) -> advantage_N``.

``rewards_N`` float64; ``group_N`` and ``run_N`` int64 codes from 0 without gaps, run codes unique over all groups;
``step_N`` int64. Keyword arguments: each column of ``needs`` as int64 codes from 0 (-1: the row has no value), each
column of ``reads`` as float64 (NaN: no value).
"""


@dataclass(frozen=True, slots=True)
class Advantage:
    """A registered advantage."""

    function: AdvantageFunction
    min_group: int = 1  # minimum number of runs per task
    needs: tuple[str, ...] = ()  # further columns of the rollout rows, passed as integer codes
    reads: tuple[str, ...] = ()  # optional columns of numbers, passed as float64
    greedy_run: bool = False  # the first run of each task is decoded greedily, as a baseline that is not trained on
    drops_at: str | None = None  # name of the option with the largest standard deviation of groups left out of training


ADVANTAGES: Registry[Advantage] = Registry("advantage function", "rft_platform.algorithms.advantages")


def advantage(
    name: str,
    *,
    min_group: int = 1,
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    greedy_run: bool = False,
    drops_at: str | None = None,
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register the decorated function under ``name`` (``algorithm.advantage_fn`` of the configuration)."""

    def decorate(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGES.add(name, Advantage(function, min_group, needs, reads, greedy_run, drops_at), function)
        return function

    return decorate


def check_advantage(name: str, args: Mapping[str, Any]) -> Advantage:
    """Return the advantage called ``name``. Raises UserError for an unknown name or option."""
    entry = ADVANTAGES.get(name)
    check_arguments(f"advantage function {name!r}", entry.function, args, hidden=(*entry.needs, *entry.reads))
    return entry


def compute_advantages(
    name: str,
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[str] | np.ndarray,
    run_ids: Sequence[str] | np.ndarray,
    steps: Sequence[int] | np.ndarray,
    *,
    columns: Mapping[str, Sequence[str | None] | Sequence[float | None]] | None = None,
    **args: Any,
) -> np.ndarray:
    """Return the advantage of every row, float64, in the given order.

    ``group_ids`` assigns rows to tasks, ``run_ids`` to runs; ``steps`` is the order within a run. ``columns`` are the
    further columns that some advantages need. ``args`` are the options of the function
    (``algorithm.advantage_fn_args``). Raises UserError for an unknown name or option, and for rewards that are not
    finite.
    """
    entry = check_advantage(name, args)
    reward_N = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(reward_N).all():
        row = int(np.flatnonzero(~np.isfinite(reward_N))[0])
        raise UserError(f"reward of row {row} is {reward_N[row]}: advantages need finite rewards; check the judge")
    group_N, run_N = codes(group_ids), codes(run_ids)
    run_N = codes(group_N * (run_N.max(initial=0) + 1) + run_N)  # the same run id in two groups means two runs
    given = columns or {}
    extra = {column: _optional_codes(given.get(column), len(reward_N)) for column in entry.needs}
    extra |= {column: _optional_numbers(given.get(column), len(reward_N)) for column in entry.reads}
    return entry.function(reward_N, group_N, run_N, np.asarray(steps, dtype=np.int64), **extra, **args)


def codes(ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Integer code from 0 for every id; equal ids get equal codes."""
    return np.unique(np.asarray(ids), return_inverse=True)[1].astype(np.int64)


def _optional_codes(ids: Sequence[Any] | None, count: int) -> np.ndarray:
    """Code of every id; -1 for None."""
    known = np.array([value is not None for value in ids or ()] if ids else [False] * count, bool)
    coded = np.full(count, -1, np.int64)
    if known.any():
        coded[known] = codes([value for value in ids or () if value is not None])
    return coded


def _optional_numbers(values: Sequence[Any] | None, count: int) -> np.ndarray:
    """Every value as float64; NaN for None."""
    return np.full(count, np.nan) if values is None else np.array(values, dtype=np.float64)  # None becomes NaN


def run_outcomes(
    reward_N: np.ndarray, group_N: np.ndarray, run_N: np.ndarray, step_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``(outcome_R, group_R)`` of every run; ``outcome_R[run_N]`` is the outcome of each row's run."""
    last_R = np.lexsort((step_N, run_N))[np.cumsum(np.bincount(run_N)) - 1]  # row of each run's last step
    return reward_N[last_R], group_N[last_R]


def step_counts(run_N: np.ndarray, step_N: np.ndarray) -> np.ndarray:
    """Number of distinct steps of every run, int64 [R]. Rows with equal run and step are the choices of one call."""
    return np.bincount(np.unique(np.stack([run_N, step_N]), axis=1)[0])
