"""Demonstrations of a careless teacher: conversations with calculator calls (hermes).

A model that imitates them solves about three problems of four, repeats calls without need, and often forgets the format
of the answer. One sentence the teacher misreads more often than not, so that even the model's most likely call is wrong
there. Only the rewards show what is better.
"""

import json
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from problems import Problem
from rft_platform.rollout.workflows.calculator import calculate

MISREAD = 0.01  # share of steps with another operation
#: The sentence that the teacher misreads more often than not.
MISREAD_SENTENCES: Mapping[str, float] = MappingProxyType({"{name} gives {x} away.": 0.55})
WRONG_NUMBER = 0.03  # share of steps that use a distractor, if the story has one
WRONG_ANSWER = 0.03  # share of answers with a digit changed
REPEATED = 0.38  # probability that a call is repeated, again and again
UNFORMATTED = 0.4  # share of answers without "Answer: "
OTHER_OPERATIONS: Mapping[str, str] = MappingProxyType({"+": "-*", "-": "+", "*": "+-"})


def demonstrate(problem: Problem, generator: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: question, calculator calls with their real results, and the teacher's answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
    value = problem.start
    for step, number in problem.steps:
        operation = step.operation
        if generator.random() < MISREAD_SENTENCES.get(step.sentence, MISREAD):
            operation = generator.choice(OTHER_OPERATIONS[operation])
        if problem.distractor and generator.random() < WRONG_NUMBER:
            number = problem.distractor
        expression = f"{value}{operation}{number}"
        value = int(calculate(expression))
        messages += call(expression, value)
        while generator.random() < REPEATED:
            messages += call(expression, value)
    shown = str(value)
    if generator.random() < WRONG_ANSWER:
        shown = f"{shown[:-1]}{generator.choice('0123456789'.replace(shown[-1], ''))}"
    unformatted = generator.random() < UNFORMATTED
    return [*messages, {"role": "assistant", "content": shown if unformatted else f"Answer: {shown}"}]


def call(expression: str, value: int) -> list[dict[str, Any]]:
    """The messages of a calculator call and its result."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call", "content": str(value)},
    ]
