"""Advantages by name: what an advantage function gets and gives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rft_platform.algorithms.registry import Registry, check_arguments
from rft_platform.errors import UserError

AdvantageFunction = Callable[..., np.ndarray]
"""``(rewards_N, group_N, run_N, step_N, *, options) -> advantage_N``.

``rewards_N`` float64; ``group_N`` and ``run_N`` int64 codes from 0 without gaps, a run code being unique over all
groups; ``step_N`` int64.
"""

ADVANTAGES: Registry[AdvantageFunction] = Registry("advantage function", "rft_platform.algorithms.advantages")


def advantage(name: str) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register the decorated function under ``name`` (``algorithm.advantage_fn`` of the configuration)."""

    def decorate(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGES.add(name, function)
        return function

    return decorate


def compute_advantages(
    name: str,
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[str] | np.ndarray,
    run_ids: Sequence[str] | np.ndarray,
    steps: Sequence[int] | np.ndarray,
    **args: Any,
) -> np.ndarray:
    """Advantage of every row, float64, in the order given.

    ``group_ids`` says which runs belong to one task, ``run_ids`` which rows to one run, ``steps`` their order in the
    run. ``args`` are the options of the function (``algorithm.advantage_fn_args``).
    Raises UserError for an unknown name or option, and for rewards that are not finite.
    """
    function = ADVANTAGES.get(name)
    check_arguments(f"advantage function {name!r}", function, args)
    reward_N = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(reward_N).all():
        row = int(np.flatnonzero(~np.isfinite(reward_N))[0])
        raise UserError(f"reward of row {row} is {reward_N[row]}: advantages need finite rewards, check the judge")
    group_N, run_N = codes(group_ids), codes(run_ids)
    run_N = codes(group_N * (run_N.max(initial=0) + 1) + run_N)  # the same run id in two groups is two runs
    return function(reward_N, group_N, run_N, np.asarray(steps, dtype=np.int64), **args)


def codes(ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Integer code from 0 of every id; equal ids get equal codes."""
    return np.unique(np.asarray(ids), return_inverse=True)[1].astype(np.int64)
