"""Demonstrations of a careless teacher: conversations with calculator calls (hermes), more than half of them wrong.

A model that imitates the demonstrations succeeds as rarely as the teacher. For one kind of problem the teacher is wrong
more often than right, so even the model's most likely call is wrong. Only the rewards show which calls are right.
"""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rft_platform.common.files import write_text
from rft_platform.recipes.calculator.problems import Problem, split_problems
from rft_platform.rollout.workflows.calculator import CALCULATOR_TOOL, calculate

#: By kind of problem: the share of demonstrations with a wrong operation, and the operations used instead.
WRONG_OPERATION: Mapping[str, tuple[float, str]] = MappingProxyType(
    {"more": (0.2, "-*"), "fewer": (0.6, "+"), "boxes": (0.3, "+-")}
)
WRONG_ANSWER = 0.25  # share of demonstrations that answer the tool's result with one digit changed


def write_demonstrations(file: Path, seed: int = 0) -> None:
    """Write one conversation for each explored problem, in columns messages and tools."""
    generator = random.Random(seed)
    explored, _ = split_problems(seed)
    rows = [{"messages": demonstrate(problem, generator), "tools": [CALCULATOR_TOOL]} for problem in explored]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def demonstrate(problem: Problem, generator: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: question, calculator call, the calculator's real result for this call, and answer.

    The teacher's mistakes are a wrong operation in the call and a wrong digit in the answer.
    """
    expression, (share, others) = problem.expression, WRONG_OPERATION[problem.kind]
    if generator.random() < share:
        expression = re.sub("[-+*]", generator.choice(others), expression)
    result = str(calculate(expression))
    answer = _one_digit_changed(result, generator) if generator.random() < WRONG_ANSWER else result
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call", "content": result},
        {"role": "assistant", "content": answer},
    ]


def _one_digit_changed(number: str, generator: random.Random) -> str:
    place = generator.choice([place for place, character in enumerate(number) if character.isdigit()])
    digit = generator.choice("0123456789".replace(number[place], ""))
    return f"{number[:place]}{digit}{number[place + 1 :]}"
