"""The judge for mathematical answers: equal in value, however written (through the library math-verify)."""

import threading
from functools import lru_cache
from typing import Any

from rft_platform.judging.reference import reference_text
from rft_platform.judging.text import response_text


def math(task: dict[str, Any], response: Any, *, answer_key: str = "answer", timeout_s: int = 5) -> float:
    """1.0 when the final answer of the response equals the reference as a mathematical object, else 0.0.

    The reference may be LaTeX, with or without ``$``, or a solution that ends in ``####`` or ``\\boxed{}``.
    ``timeout_s`` bounds the parsing and the comparison, each; an answer that needs longer counts as wrong. The library
    keeps it by a signal, which the main thread alone can have: in another thread there is no bound.
    """
    import math_verify

    limit = timeout_s if threading.current_thread() is threading.main_thread() else None
    reference = reference_text(task, answer_key).rpartition("####")[2].strip()
    expected = _parsed(_as_latex(reference), limit)
    if not expected:
        raise ValueError(f"the reference answer {reference[:80]!r} is not a mathematical expression")
    text = response_text(response)
    answer = _as_latex(text.rpartition("####")[2].strip()) if "####" in text else text
    given = _parsed(answer, limit)
    return float(math_verify.verify(expected, given, timeout_seconds=limit))


class _NothingFoundError(ValueError):
    """No expression in the text, or none in time."""


def _parsed(text: str, limit: int | None) -> list[Any]:
    try:
        return _parse_once(text, limit)
    except _NothingFoundError:
        return []


@lru_cache(maxsize=4096)
def _parse_once(text: str, limit: int | None) -> list[Any]:
    """Parsed once for all runs of a task; nothing found is not kept, for it may have been a matter of time."""
    import math_verify

    found: list[Any] = math_verify.parse(text, parsing_timeout=limit)
    if not found:
        raise _NothingFoundError(text)
    return found


def _as_latex(text: str) -> str:
    """The text with the marks that make the library read all of it as one expression."""
    return text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"${text}$"
