"""Judges of puzzles whose answers can be checked.

``countdown``: an arithmetic expression that reaches a target with given numbers, each used once. ``reasoning_gym``: the
score that the dataset of the package reasoning-gym gives to an answer.
"""

import ast
import json
import logging
import os
import re
from fractions import Fraction
from typing import Any

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import response_text
from rft_platform.judging.sandbox.bounded_call import LimitExceededError, call_bounded
from rft_platform.tasks.enclosed_text import last_enclosed
from rft_platform.tasks.reasoning_gym import COLUMN, score

_OPENING, _CLOSING = re.compile("<answer>"), re.compile("</answer>")
_LONGEST = 500  # characters of an expression


def countdown(task: dict[str, Any], response: Any, *, answer_key: str = "answer", form_reward: float = 0.1) -> float:
    """1.0 when the last ``<answer>`` is an expression of the task's numbers, each used once, that equals its target.

    ``form_reward`` for any other ``<answer>``, 0.0 without ``<answer>``. The reference is a mapping with ``target`` and
    ``numbers``, or the JSON text of such a mapping.
    """
    target, numbers = _puzzle(task, answer_key)
    answer = last_enclosed(response_text(response), _OPENING, _CLOSING)
    if answer is None:
        return 0.0
    found = _evaluated(answer.strip().partition("=")[0])
    return 1.0 if found is not None and found == (target, numbers) else form_reward


def _puzzle(task: dict[str, Any], answer_key: str) -> tuple[Fraction, list[int]]:
    """Target and sorted numbers. Raises KeyError or ValueError if the reference has not this form."""
    reference = task[answer_key]
    if isinstance(reference, str):
        try:
            reference = json.loads(reference.replace("'", '"'))
        except ValueError:
            reference = None
    if not isinstance(reference, dict) or not {"target", "numbers"} <= reference.keys():
        example = '{"target": 24, "numbers": [4, 6]}'
        raise ValueError(f"column {answer_key!r}: expected target and numbers, as in {example}")
    return Fraction(reference["target"]), sorted(int(number) for number in reference["numbers"])


def _evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and sorted numbers of an expression of whole numbers, + - * / and parentheses; None for other text."""
    if len(text) > _LONGEST:
        return None
    numbers: list[int] = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value, sorted(numbers)


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, numbers) + _value(right, numbers)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, numbers) - _value(right, numbers)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, numbers) * _value(right, numbers)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left, numbers) / _value(right, numbers)
    raise ValueError("not an expression of whole numbers, + - * / and parentheses")


_IMPORTS = ("reasoning_gym",)
_LIMIT_S = 10.0  # processor time to make an entry and score an answer
_log = logging.getLogger(__name__)


async def reasoning_gym(task: dict[str, Any], response: Any, context: JudgeContext) -> float:
    """The dataset's score, 0 to 1, of the text in the last ``<answer>``; without ``<answer>``, of the whole response.

    A worker process scores. An answer has 0 if this takes more than 10 seconds of processor time or more memory than
    ``bounded_call.MEMORY_MB``, or if the scorer would evaluate text that is not of the form of its answers. Raises
    KeyError if the task is not from a source ``reasoning_gym:NAME``, ValueError if its entry alone exceeds the limits.
    """
    row, text = task[COLUMN], response_text(response)
    answer = last_enclosed(text, _OPENING, _CLOSING)
    limit_s = min(_LIMIT_S, context.timeout_s or _LIMIT_S)
    async with context.limit("reasoning_gym", os.cpu_count() or 1):
        try:
            given = (text if answer is None else answer).strip()
            return float(await call_bounded(score, row, given, cpu_s=limit_s, imports=_IMPORTS))
        except LimitExceededError as error:
            _log.debug("reasoning_gym: an answer has the score 0 because its process %s", error.how)
            await _make_entry(row, limit_s)
    return 0.0


async def _make_entry(row: dict[str, Any], limit_s: float) -> None:
    """Raise ValueError if the entry of a row cannot be made within the limits, whatever the answer."""
    try:
        await call_bounded(score, row, "", cpu_s=limit_s, imports=_IMPORTS)
    except LimitExceededError as error:
        raise ValueError(
            f"the entry {row['index']} of reasoning_gym:{row['dataset']} cannot be made within the limits of a judge "
            f"(its process {error.how}): choose options of the dataset that give smaller tasks"
        ) from error
