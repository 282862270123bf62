"""Find texts between an opening and a closing mark in linear time, whatever a model wrote.

A pattern such as ``<answer>(.*?)</answer>`` takes quadratic time on many openings without a closing, because it
searches the rest of the text after each of them.
"""

import re
from collections.abc import Iterator


def enclosed(text: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
    """From left to right, each match of ``opening`` and the text between it and the next match of ``closing``."""
    position = 0
    while (start := opening.search(text, position)) and (end := closing.search(text, start.end())):
        yield start, text[start.end() : end.start()]
        position = end.end()


def last_enclosed(text: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> str | None:
    """The last of the texts that ``enclosed`` finds, or None."""
    last = None
    for _, last in enclosed(text, opening, closing):  # noqa: B007
        pass
    return last
