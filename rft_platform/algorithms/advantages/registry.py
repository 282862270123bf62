"""Advantages by name: what an advantage function gets and gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft_platform.algorithms.registry import Registry, check_arguments
from rft_platform.errors import UserError

AdvantageFunction = Callable[..., np.ndarray]
"""``(rewards_N, group_N, run_N, step_N, *, options) -> advantage_N``.

``rewards_N`` float64; ``group_N`` and ``run_N`` int64 codes from 0 without gaps, a run code being unique over all
groups; ``step_N`` int64. What the function ``needs`` besides comes as keyword arguments, int64 codes from 0 with -1
where a row has no value; what it ``reads`` as float64 with NaN there.
"""


@dataclass(frozen=True, slots=True)
class Advantage:
    """A registered advantage."""

    function: AdvantageFunction
    min_group: int = 1  # fewest runs of a task that it can learn from
    needs: tuple[str, ...] = ()  # columns of the rollouts that it reads besides, as codes
    reads: tuple[str, ...] = ()  # columns of numbers that it reads where there are any
    drops_at: str | None = None  # the option at or below which a group's standard deviation leaves it out of training


ADVANTAGES: Registry[Advantage] = Registry("advantage function", "rft_platform.algorithms.advantages")


def advantage(
    name: str,
    *,
    min_group: int = 1,
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    drops_at: str | None = None,
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register the decorated function under ``name`` (``algorithm.advantage_fn`` of the configuration)."""

    def decorate(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGES.add(name, Advantage(function, min_group, needs, reads, drops_at), function)
        return function

    return decorate


def check_advantage(name: str, args: Mapping[str, Any]) -> Advantage:
    """The advantage called ``name``; UserError for an unknown name or option."""
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
    """Advantage of every row, float64, in the order given.

    ``group_ids`` says which runs belong to one task, ``run_ids`` which rows to one run, ``steps`` their order in the
    run, ``columns`` what some advantages need besides. ``args`` are the options of the function
    (``algorithm.advantage_fn_args``).
    Raises UserError for an unknown name or option, and for rewards that are not finite.
    """
    entry = check_advantage(name, args)
    reward_N = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(reward_N).all():
        row = int(np.flatnonzero(~np.isfinite(reward_N))[0])
        raise UserError(f"reward of row {row} is {reward_N[row]}: advantages need finite rewards, check the judge")
    group_N, run_N = codes(group_ids), codes(run_ids)
    run_N = codes(group_N * (run_N.max(initial=0) + 1) + run_N)  # the same run id in two groups is two runs
    given = columns or {}
    extra = {column: _optional_codes(given.get(column), len(reward_N)) for column in entry.needs}
    extra |= {column: _optional_numbers(given.get(column), len(reward_N)) for column in entry.reads}
    return entry.function(reward_N, group_N, run_N, np.asarray(steps, dtype=np.int64), **extra, **args)


def codes(ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Integer code from 0 of every id; equal ids get equal codes."""
    return np.unique(np.asarray(ids), return_inverse=True)[1].astype(np.int64)


def _optional_codes(ids: Sequence[Any] | None, count: int) -> np.ndarray:
    """Code of every id, -1 where there is none."""
    known = np.array([value is not None for value in ids or ()] if ids else [False] * count, bool)
    coded = np.full(count, -1, np.int64)
    if known.any():
        coded[known] = codes([value for value in ids or () if value is not None])
    return coded


def _optional_numbers(values: Sequence[Any] | None, count: int) -> np.ndarray:
    """Every value as float64, NaN where there is none."""
    return np.full(count, np.nan) if values is None else np.array(values, dtype=np.float64)  # None becomes NaN
