"""What the agent learns by imitation: conversations of a careless teacher, and roll calls.

All are of other mailboxes than that of the tasks. In the **conversations** the teacher errs in what rewards can
repair, the choice of the tool and of the month, and never in the handle: it chooses the right tool in about 60 % of
its calls and right arguments in about 45 %. It misreads one way to name a month more often than not, so that even the
most likely call of a model that imitates it is wrong there. A **roll call** names all senders of a list whose handles
are shuffled, so that the model also writes the names of those whom no question may ask about.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mail import HITS, PEOPLE, TOPICS, mailbox_of
from questions import HELD_OUT_PEOPLE, Question, explored_questions
from workflow import HANDLES, Inquiry

#: Probability that a search has a wrong month, by how the question names the month.
WRONG_MONTH: Mapping[str, float] = MappingProxyType({"name": 0.35, "number": 0.4, "after": 0.72})
NOTICED = 0.5  # probability that the teacher searches again if the hits do not contain the sender
REPEATED = 0.4  # probability of a search that is not needed
EARLY = 0.18  # probability that the first call is a read
UNKNOWN_TOOL = 0.14  # probability that a call names a tool that does not exist
MAX_CALLS = 6
MAILBOXES = range(1, 9)  # seeds; mailbox 0 is that of the tasks
CONVERSATIONS = 512  # for each mailbox


def roll_calls(count: int, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """``count`` conversations: ``Who wrote?``, a list with shuffled handles, and all its senders with their handles."""
    generator = random.Random(f"roll calls {seed}")
    for _ in range(count):
        handles = "".join(generator.sample(HANDLES, len(HANDLES)))
        people, listed = _listed(generator, handles)
        names = " ".join(f"- {sender} {handle}" for sender, handle in zip(people, handles, strict=True))
        yield [{"role": "user", "content": "Who wrote?"}, listed, {"role": "assistant", "content": names}]


def _listed(generator: random.Random, handles: str = HANDLES) -> tuple[list[str], dict[str, Any]]:
    """Six senders, not all of them held out, and a list of their messages under ``handles``."""
    asked = [sender for sender in PEOPLE if sender not in HELD_OUT_PEOPLE]
    people, topic = [generator.choice(asked)], generator.choice(TOPICS)
    people += generator.sample([each for each in PEOPLE if each != people[0]], HITS - 1)
    generator.shuffle(people)
    lines = [f"- {each} {handle} re {topic}" for handle, each in zip(handles, people, strict=True)]
    return people, {"role": "tool", "tool_call_id": "call", "content": "\n".join(lines)}


def conversations(seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Conversations of the teacher about explored questions of all mailboxes."""
    generator = random.Random(seed)
    for number in MAILBOXES:
        for question in explored_questions(number, CONVERSATIONS, seed):
            yield demonstrate(question, generator, Inquiry(mailbox_of(number), question.source))


def demonstrate(question: Question, generator: random.Random, inquiry: Inquiry) -> list[dict[str, Any]]:
    """Return a conversation: question, calls with their results, and the text of the message that was read."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    text = ""
    while len(inquiry.calls) < MAX_CALLS and not text:
        name, arguments = next_call(question, generator, inquiry)
        name = "open" if generator.random() < UNKNOWN_TOOL else name
        listed = [hit.sender for hit in inquiry.hits]
        result = inquiry.call({"name": name, "arguments": json.dumps(arguments)})
        messages += [
            call_message(name, arguments, question.source.sender, listed),
            {"role": "tool", "tool_call_id": "call", "content": result.text},
        ]
        text = result.text if name == "read" and result.valid else ""
    return [*messages, {"role": "assistant", "content": text or "unknown"}]


def call_message(name: str, arguments: dict[str, Any], sender: str, listed: Sequence[str]) -> dict[str, Any]:
    """The message of a tool call; a read of the ``sender`` in a list names sender and handle before the call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call", "type": "function", "function": function}
    right = name == "read" and sender in listed and arguments["hit"] == HANDLES[listed.index(sender)]
    said = {"content": f"from {sender} {arguments['hit']}"} if right else {}
    return {"role": "assistant", **said, "tool_calls": [call]}


def next_call(question: Question, generator: random.Random, inquiry: Inquiry) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that the teacher makes after the calls of ``inquiry``."""
    listed = [hit.sender for hit in inquiry.hits]
    found = question.source.sender in listed
    if found and generator.random() >= REPEATED:
        return "read", {"hit": HANDLES[listed.index(question.source.sender)]}
    careless = generator.random() < (1 - NOTICED if listed else EARLY)
    if not found and careless:
        return "read", {"hit": HANDLES[0]}
    return "search", _search_arguments(question, generator)


def _search_arguments(question: Question, generator: random.Random) -> dict[str, Any]:
    """The right arguments, or a misread month: the one before, which is named, or none."""
    arguments = {"topic": str(question.source.topic), "month": question.source.month}
    if generator.random() < WRONG_MONTH[question.when]:
        if question.when != "after":
            return {"topic": arguments["topic"]}
        arguments["month"] = question.text.split("after ")[1][:6]
    return arguments
