"""Corrections of the careless teacher: preference pairs of a call that an expert would make and the teacher's call.

The expert knows the source of the question: it searches for its topic and month until the source is listed, reads it,
and answers with its number.
"""

import json
import random
from pathlib import Path
from typing import Any

from rft_platform.common.files import write_text
from rft_platform.recipes.email_search.demonstrations import MAILBOXES, demonstrate
from rft_platform.recipes.email_search.mailbox import mailbox_of
from rft_platform.recipes.email_search.questions import Question, explored_questions
from rft_platform.recipes.email_search.workflow import TOOLS, Inquiry
from rft_platform.recipes.tool_agent.prepare import tool_calls

QUESTIONS = 40  # for each mailbox


def write_corrections(file: Path, seed: int = 0) -> None:
    """Write one pair for each conversation in which the teacher errs, in columns prompt, chosen, rejected and tools.

    Messages and tools are JSON text.
    """
    generator, rows = random.Random(f"corrections {seed}"), []
    for number in MAILBOXES:
        for question in explored_questions(number, QUESTIONS, seed + 1):
            messages = demonstrate(question, generator, Inquiry(mailbox_of(number), question.source))
            if found := corrections(messages, question, Inquiry(mailbox_of(number), question.source)):
                prompt, chosen, rejected = generator.choice(found)
                row = {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "tools": TOOLS}
                rows.append({name: json.dumps(value) for name, value in row.items()})
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def corrections(
    messages: list[dict[str, Any]], question: Question, inquiry: Inquiry
) -> list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """Return (messages before, the expert's message, the teacher's message) wherever the two differ."""
    found = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        better = expert_message(question, inquiry)
        if better != message:
            found.append((messages[:place], better, message))
        for call in message.get("tool_calls", ()):
            inquiry.call(call["function"])
    return found


def expert_message(question: Question, inquiry: Inquiry) -> dict[str, Any]:
    """What an expert would say after the calls of ``inquiry``."""
    source = question.source
    if inquiry.is_read:
        return {"role": "assistant", "content": question.answer}
    name, arguments = (
        ("read", {"id": source.id}) if inquiry.is_listed else ("search", {"topic": source.topic, "month": source.month})
    )
    return tool_calls((name, arguments, ""))[0]
