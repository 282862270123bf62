"""A generated mailbox in an SQLite database with full-text search (FTS5).

Each topic has one thread a month: six messages of different people. Beside the threads there are digests, which mention
four topics of a month in their text, and forwarded copies, which repeat a message of the thread with another number. A
search lists them after the threads.
"""

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby

TOPICS = (
    *("budget", "contract", "travel", "office", "printer", "garden", "parking", "lunch", "server", "website"),
    *("invoice", "holiday", "report", "survey", "kitchen", "heating", "safety", "music", "library", "bicycle"),
)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
PEOPLE = ("ann", "ben", "eva", "tom", "kim", "leo", "mia", "sam")
DETAILS = ("room", "price", "seat", "code")
THREAD = 6  # messages of a thread
DIGESTS = 60  # a month
FORWARDED = 0.5  # probability that a thread has a forwarded copy
HITS = 6  # messages that a search returns at most


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Its id names the sender. ``number`` is what it says about ``detail`` of its topic."""

    id: str
    sender: str
    month: str
    subject: str
    text: str
    topic: str | None = None  # None: not part of a thread
    detail: str = ""
    number: int = 0


class Mailbox:
    """All messages of a seed, and the search in them."""

    def __init__(self, seed: int = 0) -> None:
        generator = random.Random(f"mailbox {seed}")
        numbers = iter(generator.sample(range(1000, 10_000), 4000))
        self.messages = {message.id: message for message in _messages(generator, numbers)}
        self._ids = list(self.messages)
        self._threads = {
            key: list(thread) for key, thread in groupby(filter(_thread_of, self.messages.values()), key=_thread_of)
        }
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE mail USING fts5(subject, month, text)")
        rows = [(row, each.subject, each.month, each.text) for row, each in enumerate(self.messages.values())]
        self._database.executemany("INSERT INTO mail(rowid, subject, month, text) VALUES (?, ?, ?, ?)", rows)

    def thread(self, topic: str, month: str) -> list[Message]:
        """The messages of a topic in a month."""
        return self._threads[topic, month]

    def search(self, topic: str = "", month: str = "") -> list[Message]:
        """At most six messages that contain ``topic`` and are of ``month``, the best match first.

        Without a topic or without a month every one matches. Raises ValueError if both are empty.
        """
        words = [("{subject text}", topic), ("month", month)]
        terms = [f'{column} : "{_plain(word)}"' for column, word in words if _plain(word)]
        if not terms:
            raise ValueError("search needs a topic or a month")
        found = self._database.execute(
            "SELECT rowid FROM mail WHERE mail MATCH ? ORDER BY bm25(mail, 20.0, 1.0, 1.0), rowid LIMIT ?",
            (" AND ".join(terms), HITS),
        )
        return [self.messages[self._ids[row]] for (row,) in found]


def _thread_of(message: Message) -> tuple[str, str] | None:
    return (message.topic, message.month) if message.topic else None


@cache
def mailbox_of(seed: int) -> Mailbox:
    """The mailbox of a seed, one object in each process."""
    return Mailbox(seed)


def _messages(generator: random.Random, numbers: Iterator[int]) -> Iterator[Message]:
    for number, month in enumerate(MONTHS):
        for topic in TOPICS:
            thread = list(_thread(generator, numbers, topic, month))
            yield from thread
            if number and generator.random() < FORWARDED:
                copied, other = generator.choice(thread), _number(generator)
                text = f"old: the {topic} {copied.detail} is {other}"
                yield Message(f"{copied.sender}{next(numbers)}", copied.sender, month, "fwd", text)
        for _ in range(DIGESTS):
            mentioned = " ".join(generator.sample(TOPICS, 4))
            sender = generator.choice(PEOPLE)
            yield Message(f"{sender}{next(numbers)}", sender, month, "digest", f"this month: {mentioned}")


def _thread(generator: random.Random, numbers: Iterator[int], topic: str, month: str) -> Iterator[Message]:
    for position, sender in enumerate(generator.sample(PEOPLE, THREAD)):
        subject = topic if position == 0 else f"re {topic}"
        detail, number = generator.choice(DETAILS), _number(generator)
        text = f"the {topic} {detail} is {number}"
        yield Message(f"{sender}{next(numbers)}", sender, month, subject, text, topic, detail, number)


def _number(generator: random.Random) -> int:
    return generator.randrange(10, 100)


def _plain(word: str) -> str:
    """Only letters and digits, so that no part of a word is a search operator."""
    return "".join(character for character in word if character.isalnum())
