"""Search model-written text with patterns from a configuration or dataset, each search within a time limit.

A pattern such as ``(a|aa)+$`` takes exponential time on some texts, and Python's ``re`` cannot be interrupted. The
library ``regex`` has a time limit. Patterns mean the same here as in ``re``.
"""

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]

SEARCH_LIMIT_S = 1.0  #: processor time of one search
_SHOWN = 120  # characters of a pattern in a message

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


def search(pattern: str, text: str) -> Any:
    """Return the first match, as ``re.search``. Raises ``re.error`` for an invalid pattern, or PatternTimeoutError."""
    return _limited(pattern, lambda: _compiled(pattern, 0).search(text, timeout=SEARCH_LIMIT_S))


def full_match(pattern: str, text: str, flags: int) -> Any:
    """Return the match of the whole text, as ``re.fullmatch``; raises as ``search``."""
    return _limited(pattern, lambda: _compiled(pattern, flags).fullmatch(text, timeout=SEARCH_LIMIT_S))


def last_match(pattern: str, text: str, flags: int) -> Any:
    """Return the last match of ``re.finditer``, or None; raises as ``search``."""
    found = _limited(pattern, lambda: deque(_compiled(pattern, flags).finditer(text, timeout=SEARCH_LIMIT_S), maxlen=1))
    return found[0] if found else None


def _limited(pattern: str, find: Callable[[], Any]) -> Any:
    try:
        return find()
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


@lru_cache(maxsize=256)
def _compiled(pattern: str, flags: int) -> Any:
    re.compile(pattern, flags)  # refuses syntax that only ``regex`` understands
    as_re = _NOTATION.sub(lambda found: _LITERAL.get(found[0], found[0]), pattern)
    return regex.compile(as_re, flags | regex.VERSION0)
