"""Write the tiny model, the tasks and the demonstrations of this project; run it again after a change."""

import json
import random
from pathlib import Path
from typing import Any

from demonstrations import demonstrate
from problems import sentences, split_problems
from rft_platform.recipes.tiny_model import CORPUS, build_model
from rft_platform.rollout.workflows.calculator import CALCULATOR_TOOL

HERE = Path(__file__).parent


def main() -> None:
    """Write ``model/``, whose tokenizer learns its vocabulary from the sentences of the problems, and ``tasks/``."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": ""}})
    corpus = (*CORPUS, call, *sentences(), "Tools: Answer: ")
    build_model(HERE / "model", corpus=corpus, template=(HERE / "chat_template.jinja").read_text())
    explored, held_out = split_problems()
    for name, problems in (("train", explored), ("test", held_out)):
        write(name, [{"question": problem.question, "answer": str(problem.answer)} for problem in problems])
    generator = random.Random(0)
    said = [{"messages": demonstrate(problem, generator), "tools": [CALCULATOR_TOOL]} for problem in explored]
    write("demonstrations", said)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Write a file of ``tasks/``."""
    (HERE / "tasks").mkdir(exist_ok=True)
    (HERE / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
