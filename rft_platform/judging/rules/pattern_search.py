"""Search model-written text with patterns from a configuration or dataset, each search within a time limit.

A pattern such as ``(a|aa)+$`` takes exponential time on some texts, and Python's ``re`` cannot be interrupted. The
library ``regex`` has a time limit. Patterns have the same meaning as in ``re``.

A search with a time limit is some microseconds slower, because the library reads the processor time at the start of
each match. So the limit is omitted if the text and the pattern guarantee a search much shorter than the limit.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Any

import regex  # type: ignore[import-untyped]

SEARCH_LIMIT_S = 1.0  #: processor time of one search
_SHOWN = 120  # characters of a pattern in a message
_FREE_STEPS = 20_000_000  # a search of fewer steps has no limit: a step takes at most 10 ns

# ``x{e}`` (fuzzy matching) and ``[[:alpha:]]`` (a named set) are notations of ``regex``; ``re`` reads them literally.
_NOTATION = re.compile(r"\\N\{[^}]*\}|\\.|\{(?:\d+(?:,\d*)?|,\d*)\}|\{|\[:", re.DOTALL)
_LITERAL = {"{": r"\{", "[:": r"[\:"}


class PatternTimeoutError(Exception):
    """A search reached its time limit; the message names the pattern."""

    def __init__(self, pattern: str) -> None:
        shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
        super().__init__(
            f"the pattern {shown!r} takes more than {SEARCH_LIMIT_S:g} s on a text of this run: rewrite it without "
            "alternatives or repetitions that overlap inside a repetition, such as (a|aa)+"
        )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A compiled pattern, with the properties that determine the cost of a search."""

    compiled: Any
    size: int  # characters of the pattern
    repeats: int | None  # None: the cost may grow exponentially with the text
    choices: int

    def limit_for(self, text: str) -> float | None:
        """The time limit of a search in ``text``; None if the search cannot take nearly as long.

        The engine tries each start, and from there each length of each repetition and each choice.
        """
        if self.repeats is None:
            return SEARCH_LIMIT_S
        ways = comb(len(text) + self.repeats + 1, self.repeats + 1) << self.choices
        return None if ways * self.size <= _FREE_STEPS else SEARCH_LIMIT_S


def search(pattern: str, text: str) -> Any:
    """Return the first match, as ``re.search``. Raises ``re.error`` for an invalid pattern, or PatternTimeoutError."""
    found = _compiled(pattern, 0)
    try:
        return found.compiled.search(text, timeout=found.limit_for(text))
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


def full_match(pattern: str, text: str, flags: int) -> Any:
    """Return the match of the whole text, as ``re.fullmatch``; raises as ``search``."""
    found = _compiled(pattern, flags)
    try:
        return found.compiled.fullmatch(text, timeout=found.limit_for(text))
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


def last_match(pattern: str, text: str, flags: int) -> Any:
    """Return the last match of ``re.finditer``, or None; raises as ``search``."""
    found, last = _compiled(pattern, flags), None
    try:
        for last in found.compiled.finditer(text, timeout=found.limit_for(text)):  # noqa: B007
            pass
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None
    return last


@lru_cache(maxsize=256)
def _compiled(pattern: str, flags: int) -> _Pattern:
    re.compile(pattern, flags)  # refuses syntax that only ``regex`` understands
    as_re = _NOTATION.sub(lambda found: _LITERAL.get(found[0], found[0]), pattern)
    return _Pattern(regex.compile(as_re, flags | regex.VERSION0), len(pattern), *_counted(pattern))


def _counted(pattern: str) -> tuple[int | None, int]:
    """The number of repetitions and the number of choices (alternatives, optional parts) in a pattern.

    The number of repetitions is None if a group is repeated, or if the pattern has a back-reference, a lookaround or
    another extension.
    """
    repeats = choices = 0
    for part in _PARTS.finditer(pattern):
        if part.lastgroup == "unbounded":
            return None, 0
        repeats += part.lastgroup == "repeat"
        choices += part.lastgroup == "choice"
    return repeats, choices


_REPEAT = r"(?:[*+]|\{\d*,?\d*\})"
_PARTS = re.compile(
    rf"(?P<unbounded>\\[1-9]|\){_REPEAT}|\((?=\?)(?!\?(?::|P<|[aims]+\))))"
    r"|(?P<other>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?::|P<|[aims]+\)))"
    rf"|(?P<repeat>{_REPEAT}\??)|(?P<choice>[?|])",
    re.DOTALL,
)
