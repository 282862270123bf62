"""Corrections of the careless teacher: preference pairs of a call that an expert would make and the teacher's call.

The expert knows the source of the question: it searches for its topic and month until the source is listed, reads it,
and answers with its text.
"""

import random
from collections.abc import Iterator
from typing import Any

from demonstrations import MAILBOXES, call_message, demonstrate
from mail import mailbox_of
from questions import Question, explored_questions
from workflow import Inquiry, right_calls

QUESTIONS = 320  # for each mailbox


def pairs(seed: int = 0) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """One correction, as ``corrections`` returns them, of each conversation in which the teacher errs."""
    generator = random.Random(f"corrections {seed}")
    for number in MAILBOXES:
        for question in explored_questions(number, QUESTIONS, seed + 1):
            messages = demonstrate(question, generator, Inquiry(mailbox_of(number), question.source))
            if found := corrections(messages, question, Inquiry(mailbox_of(number), question.source)):
                yield generator.choice(found)


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
    if inquiry.is_read:
        return {"role": "assistant", "content": question.source.text}
    search, read = right_calls(inquiry.mailbox, question.source)
    call = read if inquiry.is_listed else search
    return call_message(call["name"], call["arguments"], question.source.sender, [hit.sender for hit in inquiry.hits])
