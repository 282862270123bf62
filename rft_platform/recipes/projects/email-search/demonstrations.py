"""Demonstrations of a careless teacher: conversations with real searches in other mailboxes.

The mailboxes are others than that of the tasks, and many: in one mailbox a model would learn the ids by heart instead
of looking them up. The teacher chooses the right tool in about 75 % of its calls and right arguments in about 50 %. It
misreads one way to name a month more often than not, so that even the most likely call of a model that imitates it is
wrong there. Only the rewards show what is better.
"""

import json
import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mail import MONTHS, TOPICS, mailbox_of
from questions import EXPLORED, Question, explored_questions
from workflow import Inquiry

#: Probability that a search has the wrong month or none, by how the question names the month.
WRONG_MONTH: Mapping[str, float] = MappingProxyType({"name": 0.3, "number": 0.4, "date": 0.65})
WRONG_TOPIC = 0.05
NOTICED = 0.4  # probability that the teacher searches again if the hits do not contain the message
REPEATED = 0.2  # probability of a search that is not needed
ANY_HIT = 0.4  # probability that any hit is read, instead of the sender's
CHECKED = 0.6  # probability that the teacher reads on after a message of another sender
UNKNOWN_TOOL = 0.1  # probability that a call names a tool that does not exist
MAX_CALLS = 7
MAILBOXES = range(1, 65)  # seeds; mailbox 0 is that of the tasks


def conversations(seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """As many conversations as there are explored questions."""
    generator = random.Random(seed)
    for number in MAILBOXES:
        for question in explored_questions(number, EXPLORED // len(MAILBOXES), seed):
            yield demonstrate(question, generator, Inquiry(mailbox_of(number), question.source))


def demonstrate(question: Question, generator: random.Random, inquiry: Inquiry) -> list[dict[str, Any]]:
    """Return a conversation: question, calls with their results, and the number of the message that was read last."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    hits, text = "", ""

    def call(name: str, arguments: dict[str, Any]) -> str:
        name = "open" if generator.random() < UNKNOWN_TOOL else name
        result = inquiry.call({"name": name, "arguments": json.dumps(arguments)})
        messages.extend(
            (call_message(name, arguments), {"role": "tool", "tool_call_id": "call", "content": result.text})
        )
        return result.text if result.valid else ""

    while len(inquiry.calls) < MAX_CALLS:
        if not hits or (not inquiry.is_listed and generator.random() < NOTICED) or generator.random() < REPEATED:
            hits = call("search", _search_arguments(question, generator)) or hits
        else:
            chosen = _chosen_hit(hits, question, generator)
            text = call("read", {"id": chosen}) or text
            if text and (chosen.startswith(question.source.sender) or generator.random() >= CHECKED):
                break
    return [*messages, {"role": "assistant", "content": text.rsplit(" ", 1)[-1] if text else "unknown"}]


def call_message(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The message of a tool call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}]}


def _search_arguments(question: Question, generator: random.Random) -> dict[str, Any]:
    topic = generator.choice(TOPICS) if generator.random() < WRONG_TOPIC else str(question.source.topic)
    if generator.random() >= WRONG_MONTH[question.when]:
        return {"topic": topic, "month": question.source.month}
    if generator.random() < 0.5:
        return {"topic": topic}
    return {"topic": topic, "month": MONTHS[MONTHS.index(question.source.month) - 1]}


def _chosen_hit(hits: str, question: Question, generator: random.Random) -> str:
    listed = [line for line in hits.splitlines() if line[-1].isdigit()]
    if not listed:
        return f"{question.source.sender}{generator.randrange(1000, 10_000)}"
    of_sender = [identifier for identifier in listed if identifier.startswith(question.source.sender)]
    return generator.choice(listed) if not of_sender or generator.random() < ANY_HIT else of_sender[0]
