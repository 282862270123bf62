"""Building a judge from its configuration: one function, or a weighted sum of several."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rft_platform.errors import UserError
from rft_platform.judging.registry import RULES, find_judge
from rft_platform.judging.types import JudgeFunction, check_judge_function
from rft_platform.judging.version import judge_version


@dataclass(frozen=True, slots=True)
class JudgePart:
    """One function of a judge, with the arguments that are bound to it."""

    name: str  # of its part of the reward
    function: JudgeFunction
    args: Mapping[str, Any]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """A judge ready to run: reward = sum of weight * part."""

    parts: tuple[JudgePart, ...]
    version: str


class WeightedEntry(Protocol):
    """One entry of a weighted judge, as the configuration has it."""

    @property
    def judge(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def build_judge(
    judge: str | JudgeFunction | Sequence[WeightedEntry],
    args: Mapping[str, Any] | None = None,
    *,
    answer_key: str | None = "answer",
) -> JudgeSpec:
    """Resolve names to functions, check parameters and compute the version.

    ``args`` belong to a single judge; in a list each entry has its own. ``answer_key``, the tasks' answer column, is
    given to every built-in rule that compares with a reference. Raises ``UserError`` for an unknown name, a function
    with the wrong parameters, and arguments a function does not take or does not get.
    """
    if isinstance(judge, str) or callable(judge):
        parts = [_part(judge, dict(args or {}), 1.0, answer_key)]
    elif args:
        raise UserError(f"judge_args {dict(args)!r}: in a list of judges each entry has arguments of its own")
    elif not judge:
        raise UserError("judge: the list is empty; give at least one judge, or null where the workflow sets the reward")
    else:
        parts = [_part(entry.judge, dict(entry.args), entry.weight, answer_key) for entry in judge]
    parts = _distinct(parts)
    version = judge_version([(part.name, part.function, dict(part.args), part.weight) for part in parts])
    return JudgeSpec(tuple(parts), version)


def _part(judge: str | JudgeFunction, args: dict[str, Any], weight: float, answer_key: str | None) -> JudgePart:
    if isinstance(judge, str):
        name, function = judge, find_judge(judge)
    else:
        name, function = getattr(judge, "__name__", type(judge).__name__), judge
    if function in RULES.values():
        args = _rule_arguments(name, function, args, answer_key)
    else:
        try:
            check_judge_function(function, extra=args)
        except ValueError as error:
            raise UserError(f"judge {name!r}: {error}") from error
    return JudgePart(name, function, args, weight)


def _rule_arguments(name: str, rule: JudgeFunction, args: dict[str, Any], answer_key: str | None) -> dict[str, Any]:
    options = {
        key: parameter
        for key, parameter in inspect.signature(rule).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    needed = {key for key, parameter in options.items() if parameter.default is parameter.empty}
    if not needed <= set(args) <= set(options):
        raise UserError(
            f"judge {name!r}: got the arguments {sorted(args)}; it takes {sorted(options)}"
            + (f" and needs {sorted(needed)}" if needed else "")
        )
    if "answer_key" in options and "answer_key" not in args:
        if answer_key is None:
            raise UserError(f"judge {name!r} compares with a reference answer, but format.response_key is null")
        args = {**args, "answer_key": answer_key}
    return args


def _distinct(parts: list[JudgePart]) -> list[JudgePart]:
    """The parts with names that differ: the second ``numeric`` becomes ``numeric#2``."""
    seen: dict[str, int] = {}
    renamed = []
    for part in parts:
        seen[part.name] = count = seen.get(part.name, 0) + 1
        name = part.name if count == 1 else f"{part.name}#{count}"
        renamed.append(JudgePart(name, part.function, part.args, part.weight))
    return renamed
