"""Write the tiny model, the demonstrations and the held-out questions of this project; run it again after a change."""

import json
import random
from pathlib import Path

from questions import DEPARTMENTS, HELD_OUT_ORDERS, ask
from rft_platform.recipes.tiny_model import build_model

HERE = Path(__file__).parent
DEMONSTRATIONS = 2_000
TESTS = 256  # with 64 questions the standard error of a score is 6 points: the gate cannot see a loss of 10


def main() -> None:
    """Write ``model/``, whose tokenizer learns its vocabulary from the questions, and ``questions/``.

    ``train.jsonl``: demonstrations that teach only the form of an answer; their departments are random.
    ``test.jsonl``: held-out questions with the right department.
    """
    corpus = (*DEPARTMENTS, *(f"{question} 12?" for questions in DEPARTMENTS.values() for question in questions))
    build_model(HERE / "model", corpus=corpus)
    generator = random.Random(0)
    asked = [ask(generator)[0] for _ in range(DEMONSTRATIONS)]
    chance = [(question, generator.choice(tuple(DEPARTMENTS))) for question in asked]
    held_out = [ask(generator, HELD_OUT_ORDERS) for _ in range(TESTS)]
    folder = HERE / "questions"
    folder.mkdir(exist_ok=True)
    for name, pairs in (("train", chance), ("test", held_out)):
        rows = [{"question": question, "answer": department} for question, department in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
