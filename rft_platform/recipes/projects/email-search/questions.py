"""Questions about one message of a thread: who wrote in which month about which topic.

Explored and held-out questions share no thread and no wording, so a held-out question is new in both.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mail import DETAILS, MONTHS, PEOPLE, TOPICS, Message, mailbox_of

EXPLORED, HELD_OUT = 4096, 256  # questions
ORDERS = (
    "What did {sender} write about the {topic} {when}?",
    "{when}: which {detail} did {sender} name for the {topic}?",
    "The {topic}, {when}: what did {sender} say?",
    "Find the {detail} that {sender} gave {when} for the {topic}.",
    "{sender} wrote {when} about the {topic}. Which {detail}?",
)
#: How a question names a month: by name, by number, or as a date.
WHENS = {"name": "in {name}", "number": "in month {number}", "date": "on 15/{number}"}
WORDINGS = tuple((order, when) for order in ORDERS for when in WHENS)
#: One order for each way to name the month.
HELD_OUT_WORDINGS = frozenset(zip(ORDERS[1:4], WHENS, strict=True))


@dataclass(frozen=True, slots=True)
class Question:
    """A question, how it names the month, and the message that answers it."""

    text: str
    when: str
    template: str
    source: Message

    @property
    def answer(self) -> str:
        """The number in the source."""
        return str(self.source.number)


def split_questions(mailbox: int = 0, seed: int = 0, held_out_seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Return (explored, held out); no question occurs twice, and the two share neither threads nor wordings."""
    held_out = _distinct(random.Random(f"held out {held_out_seed}"), mailbox, HELD_OUT, held_out=True)
    return explored_questions(mailbox, EXPLORED, seed), held_out


def explored_questions(mailbox: int, count: int, seed: int = 0) -> list[Question]:
    """Return ``count`` different questions, with threads and wordings that are not held out."""
    return _distinct(random.Random(f"explored {seed}"), mailbox, count, held_out=False)


def sentences() -> Iterator[str]:
    """Yield every wording and word: the corpus from which the tokenizer learns its vocabulary."""
    for order in ORDERS:
        for when in WHENS.values():
            yield order.format(sender="", topic="", detail="", when=when.format(name="", number=""))
    for topic in TOPICS:
        yield f'the {topic} is\n"topic": "{topic}"'
    for sender in PEOPLE:
        yield f" {sender.title()} wrote, {sender.title()}: {sender.title()}\n{sender}1\n{sender}2"
    for month in MONTHS:
        yield f'in {month.title()}, "month": "{month}"'
    yield from (f"the {detail} is Which {detail} {detail} that" for detail in DETAILS)


def _distinct(generator: random.Random, mailbox: int, count: int, *, held_out: bool) -> list[Question]:
    questions: dict[str, Question] = {}
    pairs = [(topic, month) for topic in TOPICS for month in MONTHS if _is_held_out(topic + month) == held_out]
    wordings = [wording for wording in WORDINGS if (wording in HELD_OUT_WORDINGS) == held_out]
    while len(questions) < count:
        source = generator.choice(mailbox_of(mailbox).thread(*generator.choice(pairs)))
        order, when = generator.choice(wordings)
        month = MONTHS.index(source.month)
        named = WHENS[when].format(name=source.month.title(), number=month + 1)
        text = order.format(sender=source.sender.title(), topic=source.topic, detail=source.detail, when=named)
        text = text[0].upper() + text[1:]
        questions.setdefault(text, Question(text, when, f"{order} {when}", source))
    return list(questions.values())


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 5 == 0
