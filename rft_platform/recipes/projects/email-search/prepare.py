"""Write the tiny model, the tasks, the demonstrations and their corrections; run it again after a change."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corrections import pairs
from demonstrations import conversations
from questions import sentences, split_questions
from rft_platform.recipes.tiny_model import build_model
from workflow import TOOLS

HERE = Path(__file__).parent
VOCABULARY = 544  # every word of the mailbox is one token
CALLS = (("search", {"topic": "", "month": ""}), ("read", {"id": ""}), ("open", {"id": ""}))


def main() -> None:
    """Write ``model/``, whose tokenizer learns its vocabulary from the words of the mailbox, and ``tasks/``."""
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in CALLS]
    corpus = (*calls, *sentences(), "Tools: search(topic, month) read(id)")
    template = (HERE / "chat_template.jinja").read_text()
    build_model(HERE / "model", corpus=corpus, template=template, vocabulary=VOCABULARY)
    for name, questions in zip(("train", "test"), split_questions(), strict=True):
        rows = [{"question": each.text, "answer": each.answer, "source": each.source.id} for each in questions]
        write(name, rows)
    write("demonstrations", ({"messages": messages, "tools": TOOLS} for messages in conversations()))
    compared = (
        {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "tools": TOOLS}
        for prompt, chosen, rejected in pairs()
    )
    write("corrections", ({name: json.dumps(value) for name, value in row.items()} for row in compared))


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of ``tasks/``."""
    (HERE / "tasks").mkdir(exist_ok=True)
    (HERE / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
