"""Write the tiny model, the games and the demonstrations of this project; run it again after a change."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demonstrations import QUESTION, conversations
from rft_platform.recipes.tiny_model import build_model

HERE = Path(__file__).parent
GAMES = range(10_000, 14_000)  # seeds; those of demonstrations, explored and held-out games do not overlap
DEMONSTRATIONS = range(20_000, 24_000)
HELD_OUT = range(300)


def main() -> None:
    """Write ``model/``, whose tokenizer learns its vocabulary from demonstrations, and ``tasks/``."""
    shown = [messages for messages in conversations(DEMONSTRATIONS) if messages]
    corpus = tuple(message["content"] for messages in shown[:100] for message in messages)
    build_model(HERE / "model", corpus=corpus)
    for name, seeds in (("train", GAMES), ("test", HELD_OUT)):
        write(name, ({"question": QUESTION.format(seed), "seed": seed} for seed in seeds))
    write("demonstrations", ({"messages": messages} for messages in shown))


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of ``tasks/``."""
    (HERE / "tasks").mkdir(exist_ok=True)
    (HERE / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
