"""Judges that compare text: equality, containment, form and length."""

import re
from typing import Any

from rft_platform.judging.response_text import reference_text, response_text
from rft_platform.judging.rules.pattern_search import full_match


def exact_match(task: dict[str, Any], response: Any, *, answer_key: str = "answer", ignore_case: bool = False) -> float:
    """1.0 when the response equals the reference answer, ignoring white space at both ends, else 0.0."""
    answer, expected = response_text(response).strip(), reference_text(task, answer_key).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def contains(task: dict[str, Any], response: Any, *, answer_key: str = "answer", ignore_case: bool = True) -> float:
    """1.0 when the reference answer occurs in the response, else 0.0."""
    answer, expected = response_text(response), reference_text(task, answer_key).strip()
    if ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(expected in answer)


def matches_format(task: dict[str, Any], response: Any, *, pattern: str) -> float:
    """1.0 when the whole response, without white space at both ends, matches the regular expression, else 0.0.

    A dot also matches line ends. Raises PatternTimeoutError if the match takes too long.
    """
    return float(full_match(pattern, response_text(response).strip(), re.DOTALL) is not None)


def within_length(
    task: dict[str, Any], response: Any, *, max_chars: int, min_chars: int = 0, margin_chars: int = 0
) -> float:
    """1.0 for a response of ``min_chars`` to ``max_chars`` characters.

    Outside this range the reward falls linearly to 0.0 over ``margin_chars`` characters.
    """
    length = len(response_text(response))
    outside = max(min_chars - length, length - max_chars, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1.0 - outside / margin_chars) if margin_chars else 0.0
