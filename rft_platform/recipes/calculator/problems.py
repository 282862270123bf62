"""The recipe's tasks: word problems whose wording gives the operation, with numbers too large for mental arithmetic."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rft_platform.common.files import write_text
from rft_platform.rollout.workflows.calculator import calculate

EXPLORED, HELD_OUT = 4096, 192  # problems
NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pens", "cards", "coins", "books")

#: Wording and expression of each kind of problem.
KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "more": ("{name} has {a} {thing} and gets {b} more. How many?", "{a}+{b}"),
        "fewer": ("{name} has {a} {thing} and loses {b}. How many?", "{a}-{b}"),
        "boxes": ("{name} has {a} boxes of {b} {thing}. How many?", "{a}*{b}"),
    }
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and the expression that solves it."""

    kind: str
    question: str
    expression: str

    @property
    def answer(self) -> str:
        """The number that the problem asks for, in the calculator's notation."""
        return str(calculate(self.expression))


def draw(generator: random.Random) -> Problem:
    """Draw a problem with two numbers: one of three digits and one of two."""
    kind = generator.choice(list(KINDS))
    wording, expression = KINDS[kind]
    numbers = {"a": generator.randrange(100, 1000), "b": generator.randrange(10, 100)}
    question = wording.format(name=generator.choice(NAMES), thing=generator.choice(THINGS), **numbers)
    return Problem(kind, question, expression.format(**numbers))


def split_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Return all problems as (explored, held out): no expression occurs twice, in one list or in both."""
    generator = random.Random(seed)
    problems = {problem.expression: problem for problem in _endless(generator, EXPLORED + HELD_OUT)}
    every = list(problems.values())
    return every[HELD_OUT:], every[:HELD_OUT]


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` with columns question and answer."""
    for name, problems in zip(("train", "test"), split_problems(seed), strict=True):
        rows = [{"question": problem.question, "answer": problem.answer} for problem in problems]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def sentences() -> Iterator[str]:
    """Yield every wording with every name and thing: the corpus from which the tokenizer learns its vocabulary."""
    for wording, _ in KINDS.values():
        for name, thing in zip(NAMES, THINGS, strict=True):
            yield wording.format(name=name, thing=thing, a="", b="")


def _endless(generator: random.Random, count: int) -> Iterator[Problem]:
    """Yield ``count`` problems with different expressions."""
    seen: set[str] = set()
    while len(seen) < count:
        problem = draw(generator)
        if problem.expression not in seen:
            seen.add(problem.expression)
            yield problem
