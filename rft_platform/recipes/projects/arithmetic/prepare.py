"""Write the tiny model and the tasks of this project: additions of two numbers below 100, a part of them held out.

The split is by unordered pair: if a+b is held out, b+a is held out too. So the held-out pass rate measures addition,
and not the memory of a swapped pair.
"""

import json
import random
from pathlib import Path

from rft_platform.recipes.tiny_model import build_model

HERE = Path(__file__).parent
NUMBERS = 100  # operands are 0 .. NUMBERS - 1
HELD_OUT_PAIRS = 300  # of two different numbers; each gives two problems


def split_additions(seed: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all additions as (explored, held out), shuffled; ``seed`` determines the split and the order."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(NUMBERS) for b in range(a + 1, NUMBERS)]
    held_out = {frozenset(pair) for pair in generator.sample(pairs, HELD_OUT_PAIRS)}
    every = [(a, b) for a in range(NUMBERS) for b in range(NUMBERS)]
    generator.shuffle(every)
    return (
        [pair for pair in every if frozenset(pair) not in held_out],
        [pair for pair in every if frozenset(pair) in held_out],
    )


def main() -> None:
    """Write ``model/`` and ``tasks/``; the rows of ``train.jsonl`` are also the demonstrations of the warm start."""
    build_model(HERE / "model")
    tasks = HERE / "tasks"
    tasks.mkdir(exist_ok=True)
    for name, additions in zip(("train", "test"), split_additions(), strict=True):
        rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in additions]
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
