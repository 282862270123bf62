"""Write the tiny model, the tasks, the demonstrations and their corrections; run it again after a change."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from corrections import pairs
from demonstrations import conversations, roll_calls
from mail import mailbox_of
from questions import Question, sentences, split_questions
from rft_platform.recipes.tiny_model import build_model
from workflow import HANDLES, TOOLS, right_calls

HERE = Path(__file__).parent
VOCABULARY = 620  # every word of the mailbox is one token
ROLL_CALLS = 1024
CALLS = (("search", {"topic": "", "month": ""}), ("read", {"hit": ""}), ("open", {"hit": ""}))


def main() -> None:
    """Write ``model/``, whose tokenizer learns its vocabulary from the words of the mailbox, and ``tasks/``."""
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in CALLS]
    corpus = (*calls, *sentences(), "Tools: search(topic, month) read(hit)", "error: unknown tool open no such hit")
    corpus = (*corpus, "Who wrote?", f"from {' '.join(HANDLES)}")
    template = (HERE / "chat_template.jinja").read_text()
    build_model(
        HERE / "model",
        size="700k",
        corpus=corpus,
        template=template,
        vocabulary=VOCABULARY,
        copies=True,
    )
    for name, questions in zip(("train", "test"), split_questions(), strict=True):
        write(name, map(task, questions))
    shown = chain(conversations(), roll_calls(ROLL_CALLS))
    write("demonstrations", ({"messages": messages, "tools": TOOLS} for messages in shown))
    compared = (
        {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "tools": TOOLS}
        for prompt, chosen, rejected in pairs()
    )
    write("corrections", compared)


def task(question: Question) -> dict[str, Any]:
    """A question with its answer, the calls that find it, and the place of its source in the mailbox."""
    mailbox = mailbox_of(0)
    calls = json.dumps(right_calls(mailbox, question.source))
    source = mailbox.messages.index(question.source)
    return {"question": question.text, "answer": question.answer, "tool_calls": calls, "source": source}


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of ``tasks/``."""
    (HERE / "tasks").mkdir(exist_ok=True)
    (HERE / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
