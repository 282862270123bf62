"""Questions to a shop's front desk, and the department that each belongs to."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from rft_platform.common.files import write_text

DEPARTMENTS = {
    "delivery": ("Where is my parcel", "When does my order arrive", "The courier lost order", "Track my parcel"),
    "billing": (
        "I was charged twice for",
        "Send me the invoice of",
        "The price is wrong on",
        "My card was refused for",
    ),
    "returns": ("I want my money back for", "It broke after a day:", "It does not fit:", "How do I send back"),
}
_ORDERS = range(100, 1000)
_HELD_OUT = 100  # orders that only the evaluation names
_DEMONSTRATIONS = 2_000
_TESTS = 256  # with 64 questions the standard error of a score is 6 points: the gate cannot see a loss of 10


def ask(generator: random.Random, orders: Sequence[int] = _ORDERS[_HELD_OUT:]) -> tuple[str, str]:
    """A customer's question, and the department that it belongs to."""
    department = generator.choice(tuple(DEPARTMENTS))
    return f"{generator.choice(DEPARTMENTS[department])} {generator.choice(orders)}?", department


def write_questions(folder: Path, seed: int = 0) -> None:
    """Write ``train.jsonl`` and ``test.jsonl``.

    ``train.jsonl``: demonstrations that teach only the form of an answer; their departments are random.
    ``test.jsonl``: held-out questions with the right department.
    """
    generator = random.Random(seed)
    asked = [ask(generator)[0] for _ in range(_DEMONSTRATIONS)]
    chance = [{"question": question, "answer": generator.choice(tuple(DEPARTMENTS))} for question in asked]
    held_out = [ask(generator, _ORDERS[:_HELD_OUT]) for _ in range(_TESTS)]
    known = [{"question": question, "answer": department} for question, department in held_out]
    for name, rows in (("train", chance), ("test", known)):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def corpus() -> tuple[str, ...]:
    """The text from which the tokenizer learns its vocabulary."""
    return (*DEPARTMENTS, *(f"{question} 12?" for questions in DEPARTMENTS.values() for question in questions))
