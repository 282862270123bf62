"""Judges of puzzles whose answers can be checked.

``countdown``: an arithmetic expression that reaches a target with given numbers, each used once. ``reasoning_gym``: the
score that the dataset of the package reasoning-gym gives to an answer.
"""

import ast
import json
import re
from fractions import Fraction
from typing import Any

from rft_platform.judging.judged_run import response_text
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


_OPENING, _CLOSING = re.compile("<answer>"), re.compile("</answer>")


def reasoning_gym(task: dict[str, Any], response: Any) -> float:
    """The dataset's score, 0 to 1, of the text in the last ``<answer>``; without ``<answer>``, of the whole response.

    Raises KeyError if the task is not from a source ``reasoning_gym:NAME``.
    """
    text = response_text(response)
    answer = last_enclosed(text, _OPENING, _CLOSING)
    return score(task[COLUMN], (text if answer is None else answer).strip())
