"""The demo's tasks: additions of two numbers below 100, a part of them held out.

The split is by unordered pair: if a+b is held out, b+a is held out too. So the held-out pass rate measures addition,
and not the memory of a swapped pair.
"""

import json
import random
from pathlib import Path

from rft_platform.common.files import write_text

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


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``train.jsonl``, whose rows are also the demonstrations of the warm start, and ``test.jsonl``."""
    for name, additions in zip(("train", "test"), split_additions(seed), strict=True):
        rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in additions]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
