"""Operators by name (built-in, from plugins, or any importable function), and the columns that they get and change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiences:
    """N rows (model calls) of R runs of G groups (tasks), in sampling order; treat it as read-only.

    Runs on which the judge failed are not included. A reward part or metric that a run lacks is NaN.
    """

    run_N: np.ndarray  # int64: the run of each row
    step_N: np.ndarray  # int64: position of the call in its run
    length_N: np.ndarray  # int64: tokens of the response
    truncated_N: np.ndarray  # bool: the response ended at its token limit
    kept_N: np.ndarray  # bool: trained on, unless a later operator removes the row
    run_ids: Sequence[str]
    group_ids: Sequence[str]  # [G]
    task_ids: Sequence[str]  # [G]
    group_R: np.ndarray  # int64: the group of each run, numbered in order of appearance
    empty_R: np.ndarray  # bool: the last answer has neither text nor a tool call
    judged_R: np.ndarray  # float64: the judge's reward, unchanged by operators
    reward_R: np.ndarray  # float64: the reward after the operators so far
    kept_R: np.ndarray  # bool: the run counts in its group
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64 [R] each: parts of the reward
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64 [R] each: metrics of the workflow
    wanted_groups: int | None = None  # groups that the round is to train on; None: all

    @property
    def longest_R(self) -> np.ndarray:
        """int64 [R]: tokens of the run's longest response."""
        longest = np.zeros(len(self.run_ids), np.int64)
        np.maximum.at(longest, self.run_N, self.length_N)
        return longest

    @property
    def tokens_R(self) -> np.ndarray:
        """int64 [R]: tokens of all responses of the run."""
        return np.bincount(self.run_N, weights=self.length_N, minlength=len(self.run_ids)).astype(np.int64)

    @property
    def calls_R(self) -> np.ndarray:
        """int64 [R]: model calls of the run; the choices of one call (``n``) are several rows with one step."""
        calls = np.unique(np.stack([self.run_N, self.step_N]), axis=1)
        return np.bincount(calls[0], minlength=len(self.run_ids))

    @property
    def truncated_R(self) -> np.ndarray:
        """bool [R]: whether a response of the run ended at its token limit."""
        cut: np.ndarray = np.bincount(self.run_N, weights=self.truncated_N, minlength=len(self.run_ids)) > 0
        return cut

    def range_by_group(self, value_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 [G] each: smallest and largest value of the kept runs of a group; inf and -inf if none is kept."""
        low_G, high_G = np.full(len(self.group_ids), np.inf), np.full(len(self.group_ids), -np.inf)
        np.minimum.at(low_G, self.group_R[self.kept_R], value_R[self.kept_R])
        np.maximum.at(high_G, self.group_R[self.kept_R], value_R[self.kept_R])
        return low_G, high_G


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes that an operator makes; a field that is not set changes nothing."""

    reward: np.ndarray | None = None  # float64 [R]
    drop: np.ndarray | None = None  # bool [R]: runs to leave out, also from their group's advantages
    mask: np.ndarray | None = None  # bool [N]: rows to leave out of training; their run's reward still counts
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # float64 [R] each: stored with the reward
    facts: Mapping[str, float] = field(default_factory=dict)  # numbers for the report


OperatorFunction = Callable[..., Change]
"""``(experiences: Experiences, *, options) -> Change``."""

OPERATORS: Registry[OperatorFunction] = Registry("experience operator", "rft_platform.judging.operators")


def operator(name: str) -> Callable[[OperatorFunction], OperatorFunction]:
    """Register the decorated function under ``name`` (``data_processor.experience_pipeline.operators``)."""

    def decorate(function: OperatorFunction) -> OperatorFunction:
        OPERATORS.add(name, function, function)
        return function

    return decorate


def find_operator(name: str, args: Mapping[str, Any]) -> OperatorFunction:
    """Return the operator ``name``, or the function if ``name`` is a reference (``module:function``).

    Raises UserError for an unknown name, an unknown option, or an option value that does not fit.
    """
    function: Any = load_object(name, "experience operator") if ":" in name else OPERATORS.get(name)
    if not callable(function):
        raise UserError(f"experience operator {name!r}: expected a function, got a {type(function).__name__}")
    check_arguments(f"experience operator {name!r}", function, args)
    return function


__all__ = ["OPERATORS", "Change", "Experiences", "OperatorFunction", "find_operator", "operator"]
