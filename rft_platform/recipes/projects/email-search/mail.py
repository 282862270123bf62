"""A generated mailbox in an SQLite database with full-text search (FTS5).

Each topic has one thread a month, for four years: six messages of different people. Beside the threads there are
digests, which mention four topics of a month in their text, and forwarded copies, which repeat a message of the thread
with another number. A search lists them after the threads.
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
MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
YEARS = ("21", "22", "23", "24")
MONTHS = tuple(f"{name} {year}" for year in YEARS for name in MONTH_NAMES)
PEOPLE = (
    *("Ann", "Ben", "Eva", "Tom", "Kim", "Leo", "Mia", "Sam", "Ada", "Bob", "Dan", "Eli", "Fay", "Gus", "Hal", "Ida"),
    *("Jim", "Kay", "Lea", "Max", "Nia", "Oli", "Pam", "Ray", "Sue", "Ted", "Uma", "Vic", "Wes", "Yan", "Zoe", "Amy"),
    *("Bea", "Cal", "Dot", "Eve", "Flo", "Guy", "Ivy", "Ken"),
)
DETAILS = ("room", "price", "seat", "code")
THREAD = 6  # messages of a thread
DIGESTS = 20  # a month
FORWARDED = 0.5  # probability that a thread has a forwarded copy
HITS = 6  # messages that a search returns at most


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``number`` is what it says about ``detail`` of its topic."""

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
        self.messages = list(_messages(random.Random(f"mailbox {seed}")))
        self._threads = {
            key: list(thread) for key, thread in groupby(filter(_thread_of, self.messages), key=_thread_of)
        }
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE mail USING fts5(subject, month, text)")
        rows = [(row, each.subject, each.month, each.text) for row, each in enumerate(self.messages)]
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
        return [self.messages[row] for (row,) in found]


def _thread_of(message: Message) -> tuple[str, str] | None:
    return (message.topic, message.month) if message.topic else None


@cache
def mailbox_of(seed: int) -> Mailbox:
    """The mailbox of a seed, one object in each process."""
    return Mailbox(seed)


def _messages(generator: random.Random) -> Iterator[Message]:
    for number, month in enumerate(MONTHS):
        for topic in TOPICS:
            thread = list(_thread(generator, topic, month))
            yield from thread
            if number and generator.random() < FORWARDED:
                copied = generator.choice(thread)
                text = f"old: the {topic} {copied.detail} is {_number(generator)}"
                yield Message(copied.sender, month, "fwd", text)
        for _ in range(DIGESTS):
            mentioned = " ".join(generator.sample(TOPICS, 4))
            yield Message(generator.choice(PEOPLE), month, "digest", f"this month: {mentioned}")


def _thread(generator: random.Random, topic: str, month: str) -> Iterator[Message]:
    for position, sender in enumerate(generator.sample(PEOPLE, THREAD)):
        subject = topic if position == 0 else f"re {topic}"
        detail, number = generator.choice(DETAILS), _number(generator)
        yield Message(sender, month, subject, f"the {topic} {detail} is {number}", topic, detail, number)


def _number(generator: random.Random) -> int:
    return generator.randrange(10, 100)


def _plain(word: str) -> str:
    """Only letters, digits and spaces, so that no part of a word is a search operator."""
    return "".join(character for character in word if character.isalnum() or character == " ").strip()
