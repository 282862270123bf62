"""Registry of task selectors, and the types that they receive and return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Moment:
    """Which batch of tasks is chosen, and everything else that the choice may depend on."""

    batch_size: int
    step: int  # batches of tasks that the project took before
    round: int
    round_step: int  # batches of tasks that the round took before
    seed: int
    feature_keys: Sequence[str] = ()  # columns of the tasks with their difficulty


@dataclass(frozen=True, slots=True)
class Chosen:
    """Indices of the chosen tasks, in order, and statistics for the report."""

    indices: list[int]
    statistics: Mapping[str, float] = field(default_factory=dict)


SelectorFunction = Callable[..., Chosen]
"""``(tasks: Sequence[Task], moment: Moment, history: History, *, options) -> Chosen``."""

SELECTORS: Registry[SelectorFunction] = Registry("task selector", "rft_platform.tasks.selectors")


def selector(name: str) -> Callable[[SelectorFunction], SelectorFunction]:
    """Register the decorated function under ``name`` (``task_selector.selector_type`` of a taskset)."""

    def decorate(function: SelectorFunction) -> SelectorFunction:
        SELECTORS.add(name, function, function)
        return function

    return decorate


def find_selector(name: str, args: Mapping[str, Any]) -> SelectorFunction:
    """The selector called ``name``; UserError for an unknown name or unsuitable options."""
    function = SELECTORS.get(name)
    check_arguments(f"task selector {name!r}", function, args)
    return function


def select(
    name: str, tasks: Sequence[Task], moment: Moment, history: History, args: Mapping[str, Any] | None = None
) -> Chosen:
    """The tasks of one batch. Raises ValueError if nothing can be chosen, and UserError as ``find_selector``."""
    if not tasks or moment.batch_size < 1 or moment.step < 0:
        raise ValueError(
            f"select: {len(tasks)} tasks, batch_size {moment.batch_size}, step {moment.step}: nothing can be selected"
        )
    return find_selector(name, args or {})(tasks, moment, history, **(args or {}))
