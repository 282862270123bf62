"""Selectors by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_platform.algorithms.registry import Registry, check_arguments
from rft_platform.tasks.selectors.history import History
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Moment:
    """Which batch of tasks is to be chosen, and what a choice may depend on."""

    batch_size: int
    step: int  # batches of tasks that the project took before it
    round: int
    round_step: int  # batches of tasks that its round took before it
    seed: int
    feature_keys: Sequence[str] = ()  # columns of the tasks that say how hard they are


@dataclass(frozen=True, slots=True)
class Chosen:
    """Indices of the chosen tasks, in order, and numbers for the report."""

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
    """The selector called ``name``; UserError for an unknown name, or options that do not fit."""
    function = SELECTORS.get(name)
    check_arguments(f"task selector {name!r}", function, args)
    return function


def select(
    name: str, tasks: Sequence[Task], moment: Moment, history: History, args: Mapping[str, Any] | None = None
) -> Chosen:
    """The tasks of one batch. Raises ValueError where there is nothing to choose from, and as ``find_selector``."""
    if not tasks or moment.batch_size < 1 or moment.step < 0:
        raise ValueError(
            f"select: {len(tasks)} tasks, batch_size {moment.batch_size}, step {moment.step}: nothing can be selected"
        )
    return find_selector(name, args or {})(tasks, moment, history, **(args or {}))
