"""Word problems of two or three steps: a story changes a quantity, some numbers in it do not matter.

A template is the story without names, things and numbers: the opening, the sentence of each step, the distractor and
its place, and the question. Explored and held-out problems share no template and no number of two or more digits, so a
held-out problem is new in both.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from rft_platform.rollout.workflows.calculator import calculate

EXPLORED, HELD_OUT = 4096, 256  # problems
THREE_STEPS = 0.3  # share of problems with three steps; the others have two
DISTRACTED = 0.5  # share of problems with a number that does not matter
NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pens", "cards", "coins", "books")
OPENINGS = ("{name} has {x} {thing}.", "{name} owns {x} {thing}.", "There are {x} {thing} in the box of {name}.")
DISTRACTORS = ("{name} is {x} years old.", "The box weighs {x} grams.", "{name} lives in house {x}.")
QUESTIONS = ("How many {thing} are there now?", "How many {thing} does {name} have?")


@dataclass(frozen=True, slots=True)
class Step:
    """How a sentence changes the quantity."""

    sentence: str
    operation: str  # "+", "-" or "*"


STEPS = (
    Step("{name} gets {x} more.", "+"),
    Step("{name} buys {x} {thing}.", "+"),
    Step("A friend brings {x}.", "+"),
    Step("{name} loses {x}.", "-"),
    Step("{name} sells {x} of them.", "-"),
    Step("{name} gives {x} away.", "-"),
    Step("Then there are {x} times as many.", "*"),
    Step("{name} collects until there are {x} times as many.", "*"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and the numbers and steps that solve it."""

    question: str
    template: str
    start: int
    steps: tuple[tuple[Step, int], ...]
    distractor: int | None  # a number of the story that does not matter

    @property
    def answer(self) -> int:
        """The quantity after the last step."""
        value = self.start
        for step, number in self.steps:
            value = int(calculate(f"{value}{step.operation}{number}"))
        return value

    @property
    def numbers(self) -> set[int]:
        """All numbers of two or more digits in the question."""
        stated = {self.start, *(number for _, number in self.steps)} | ({self.distractor} if self.distractor else set())
        return {number for number in stated if number > 9}


def draw(generator: random.Random, *, held_out: bool) -> Problem:
    """Draw a problem with a template and numbers of one side of the split."""
    while True:
        problem = _draw(generator, held_out)
        if _is_held_out(problem.template) == held_out:
            return problem


def split_problems(seed: int = 0, held_out_seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Return (explored, held out); no question occurs twice, and the two share neither templates nor numbers.

    Another ``held_out_seed`` gives other held-out problems.
    """
    explored, held_out = random.Random(f"explored {seed}"), random.Random(f"held out {held_out_seed}")
    return _distinct(explored, EXPLORED, held_out=False), _distinct(held_out, HELD_OUT, held_out=True)


def sentences() -> Iterator[str]:
    """Yield every sentence with names and things: the corpus from which the tokenizer learns its vocabulary."""
    forms = (*OPENINGS, *DISTRACTORS, *QUESTIONS, *(step.sentence for step in STEPS))
    for form in forms:
        for name, thing in zip(NAMES, THINGS, strict=True):
            yield form.format(name=name, thing=thing, x="")


def _draw(generator: random.Random, held_out: bool) -> Problem:
    names = {"name": generator.choice(NAMES), "thing": generator.choice(THINGS)}
    start = _number(generator, 100, 1000, held_out)
    steps: list[tuple[Step, int]] = []
    for _ in range(3 if generator.random() < THREE_STEPS else 2):
        step = generator.choice([step for step in STEPS if step.operation not in _used_up(steps)])
        number = generator.randrange(2, 10) if step.operation == "*" else _number(generator, 10, 100, held_out)
        steps.append((step, number))
    story = [(generator.choice(OPENINGS), start), *((step.sentence, number) for step, number in steps)]
    distractor = None
    if generator.random() < DISTRACTED:
        distractor = _number(generator, 10, 100, held_out)
        story.insert(generator.randint(1, len(story)), (generator.choice(DISTRACTORS), distractor))
    question = generator.choice(QUESTIONS)
    text = " ".join([*(form.format(**names, x=number) for form, number in story), question.format(**names)])
    return Problem(text, " ".join([*(form for form, _ in story), question]), start, tuple(steps), distractor)


def _used_up(steps: list[tuple[Step, int]]) -> str:
    """A quantity is multiplied once, so that it keeps at most five digits."""
    return "*" if any(step.operation == "*" for step, _ in steps) else ""


def _number(generator: random.Random, low: int, high: int, held_out: bool) -> int:
    """A number of one side of the split: held-out numbers have remainder 3 when they are divided by 7."""
    return generator.choice([number for number in range(low, high) if (number % 7 == 3) == held_out])


def _is_held_out(template: str) -> bool:
    return zlib.crc32(template.encode()) % 5 == 0


def _distinct(generator: random.Random, count: int, *, held_out: bool) -> list[Problem]:
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw(generator, held_out=held_out)
        problems.setdefault(problem.question, problem)
    return list(problems.values())
