"""Corrections of the careless teacher: preference pairs of what an expert would say and what the teacher says.

The expert knows the source of the question: it searches for its topic and month until the source is listed, reads it,
and answers with its text. The teacher always stops when it has read the source. Pairs of its errors alone would
therefore prefer a call to an answer wherever an answer occurs, and an agent that learns from them never stops. So the
right answer is also preferred to a further call.
"""

import random
from collections.abc import Iterator
from typing import Any

from demonstrations import MAILBOXES, call_message, demonstrate, next_call
from mail import mailbox_of
from questions import Question, explored_questions
from workflow import HANDLES, Inquiry

QUESTIONS = 320  # for each mailbox


def pairs(seed: int = 0) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """One correction, as ``corrections`` returns them, of each conversation in which the teacher errs."""
    generator = random.Random(f"corrections {seed}")
    for number in MAILBOXES:
        for question in explored_questions(number, QUESTIONS, seed + 1):
            messages = demonstrate(question, generator, Inquiry(mailbox_of(number), question.source))
            if found := corrections(messages, question, Inquiry(mailbox_of(number), question.source), generator):
                yield generator.choice(found)


def corrections(
    messages: list[dict[str, Any]], question: Question, inquiry: Inquiry, generator: random.Random
) -> list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """Return (messages before, the expert's message, the other message) of all pairs in a conversation."""
    found = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        better = expert_message(question, inquiry)
        if better != message:
            found.append((messages[:place], better, message))
        elif inquiry.is_read:
            further = call_message(*next_call(question, generator, inquiry), question.source.sender, _listed(inquiry))
            found.append((messages[:place], better, further))
        for call in message.get("tool_calls", ()):
            inquiry.call(call["function"])
    return found


def expert_message(question: Question, inquiry: Inquiry) -> dict[str, Any]:
    """What an expert would say after the calls of ``inquiry``."""
    source = question.source
    if inquiry.is_read:
        return {"role": "assistant", "content": source.text}
    if inquiry.is_listed:
        return call_message("read", {"hit": HANDLES[inquiry.hits.index(source)]}, source.sender, _listed(inquiry))
    return call_message("search", {"topic": str(source.topic), "month": source.month}, source.sender, _listed(inquiry))


def _listed(inquiry: Inquiry) -> list[str]:
    return [hit.sender for hit in inquiry.hits]
