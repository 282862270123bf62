"""Registry of task selectors, and the types that they receive and return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Moment:
    """The tasks to choose from a taskset, and everything else that the choice may depend on.

    ``step`` counts batches of tasks. With several tasksets, a batch has tasks of each.
    """

    count: int  # tasks to choose
    first: int  # tasks of the taskset that the project took before
    round_first: int  # tasks of the taskset that the round took before
    step: int  # batches that the project took before
    round: int
    seed: int
    feature_keys: Sequence[str] = ()  # columns of the tasks with their difficulty
    step_of: Callable[[int], int] = field(default=lambda position: 0)  # the step that took a position of the taskset


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
    if not tasks or moment.count < 1 or moment.first < 0:
        raise ValueError(
            f"select: {len(tasks)} tasks, count {moment.count}, first {moment.first}: nothing can be selected"
        )
    return find_selector(name, args or {})(tasks, moment, history, **(args or {}))
