"""Questions about one message of a thread: who wrote in which month about which topic.

A held-out question asks about a sender and a month that no other question asks about: not those of the tasks, of the
demonstrations and of the corrections.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mail import DETAILS, MONTHS, PEOPLE, TOPICS, Message, mailbox_of

EXPLORED, HELD_OUT = 4096, 256  # questions
HELD_OUT_PEOPLE = frozenset(PEOPLE[::4])
HELD_OUT_MONTHS = frozenset(MONTHS[::5])  # 10 of 48; each name of a month and each year occurs in others, too
ORDERS = (
    "What does the mail from {sender} say about the {topic} {when}?",
    "Which {detail} is in the mail from {sender} about the {topic} {when}?",
    "About the {topic} {when}: what came from {sender}?",
    "Find the {detail} in the mail from {sender} {when} on the {topic}.",
)
#: How a question names a month: by name, by number, or by the month before it.
WHENS = {"name": "in {name}", "number": "in {number}/{year}", "after": "in the month after {before}"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, how it names the month, and the message that answers it."""

    text: str
    when: str
    source: Message

    @property
    def answer(self) -> str:
        """The number in the source."""
        return str(self.source.number)


def split_questions(mailbox: int = 0, seed: int = 0, held_out_seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Return (explored, held out); no question occurs twice, and the two share neither senders nor months."""
    held_out = _distinct(random.Random(f"held out {held_out_seed}"), mailbox, HELD_OUT, held_out=True)
    return explored_questions(mailbox, EXPLORED, seed), held_out


def explored_questions(mailbox: int, count: int, seed: int = 0) -> list[Question]:
    """Return ``count`` different questions about senders and months that are not held out."""
    return _distinct(random.Random(f"explored {mailbox} {seed}"), mailbox, count, held_out=False)


def sentences() -> Iterator[str]:
    """Yield every wording and word: the corpus from which the tokenizer learns its vocabulary."""
    for order in ORDERS:
        for when in WHENS.values():
            yield order.format(sender="", topic="", detail="", when=when.format(name="", number="", year="", before=""))
    for topic in TOPICS:
        yield f'the {topic} is\n"topic": "{topic}"'
    for sender in PEOPLE:
        yield f"- {sender} re"
    for month in MONTHS[:12]:
        yield f'in {month}, "month": "{month}"'
    yield from (f"the {detail} is Which {detail} {detail} that" for detail in DETAILS)


def _distinct(generator: random.Random, mailbox: int, count: int, *, held_out: bool) -> list[Question]:
    sources = [
        message
        for message in mailbox_of(mailbox).messages
        if message.topic
        and (message.sender in HELD_OUT_PEOPLE) == held_out
        and (message.month in HELD_OUT_MONTHS) == held_out
    ]
    questions: dict[str, Question] = {}
    while len(questions) < count:
        question = _question(generator, generator.choice(sources))
        questions.setdefault(question.text, question)
    return list(questions.values())


def _question(generator: random.Random, source: Message) -> Question:
    place = MONTHS.index(source.month)
    name, year = source.month.split()
    when = generator.choice([when for when in WHENS if when != "after" or name != "Jan"])
    named = WHENS[when].format(name=source.month, number=place % 12 + 1, year=year, before=MONTHS[place - 1])
    order = generator.choice(ORDERS)
    text = order.format(sender=source.sender, topic=source.topic, detail=source.detail, when=named)
    return Question(text, when, source)
