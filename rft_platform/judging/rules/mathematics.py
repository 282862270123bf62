"""The judge ``math``: compares mathematical answers by value, however they are written (library math-verify)."""

import logging
import os
import re
from functools import lru_cache
from typing import Any

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.response_text import reference_text, response_text
from rft_platform.judging.rules.numbers import plain_notation
from rft_platform.judging.sandbox.bounded_call import LimitExceededError, call_bounded
from rft_platform.tasks.enclosed_text import last_enclosed

_IMPORTS = ("math_verify", "latex2sympy2_extended", "sympy")
_log = logging.getLogger(__name__)


async def math(
    task: dict[str, Any],
    response: Any,
    context: JudgeContext,
    *,
    answer_key: str = "answer",
    timeout_s: float = 5,
) -> float:
    """1.0 when the final answer of the response equals the reference as a mathematical object, else 0.0.

    The reference may be LaTeX, with or without ``$``, or a solution that ends in ``####`` or ``\\boxed{}``. A worker
    process parses and compares response and reference. An answer counts as wrong if this takes more than ``timeout_s``
    seconds of processor time or more memory than ``bounded_call.MEMORY_MB``.
    """
    reference, text = reference_text(task, answer_key).rpartition("####")[2].strip(), response_text(response)
    limit_s = min(timeout_s, context.timeout_s or timeout_s)
    async with context.limit("math", os.cpu_count() or 1):
        try:
            equal = await call_bounded(are_equal, reference, text, cpu_s=limit_s, imports=_IMPORTS)
        except LimitExceededError as error:
            _log.debug("math: an answer is scored as wrong because its process %s", error.how)
            equal = False if await _is_expression(reference, limit_s) else None
    if equal is None:
        raise ValueError(f"the reference answer {reference[:80]!r} is not a mathematical expression")
    return float(equal)


async def _is_expression(reference: str, limit_s: float) -> bool:
    try:
        return await call_bounded(are_equal, reference, "", cpu_s=limit_s, imports=_IMPORTS) is not None
    except LimitExceededError as error:
        raise ValueError(f"the reference answer {reference[:80]!r} {error.how}") from error


def are_equal(reference: str, text: str) -> bool | None:
    """Whether the final answer in ``text`` equals the reference; None if the reference is not an expression."""
    import math_verify

    expected = _parsed(_as_latex(plain_notation(reference)))
    if not expected:
        return None
    return bool(math_verify.verify(expected, _parsed(final_answer(text)), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """Expressions that the library finds in a text, the most likely answer first; cached for all runs of a task."""
    import math_verify

    found: list[Any] = math_verify.parse(text, parsing_timeout=None)
    return found


def final_answer(text: str) -> str:
    """Return the part of a response that contains its answer, marked up for the library.

    The answer follows ``####``, is in the last ``<answer>``, or follows ``A:``. LaTeX without ``$``, a bare tuple and a
    bare interval are enclosed in ``$``: without it the library reads only single numbers from them.
    """
    text = _MONEY.sub("", plain_notation(text))
    if "####" in text:
        return _alone(text.rpartition("####")[2].strip())
    if (tagged := last_enclosed(text, _OPENING, _CLOSING)) is not None:
        return _alone(tagged.strip())
    text = _A.sub("The answer is ", _LEAD.sub("", text))
    if _is_marked(text):
        return text
    tail = _INTRODUCTION.split(text)[-1].strip().splitlines()[-1:]
    bare = _WORDS.sub("", tail[0]).strip().removesuffix(".") if tail else ""
    return f"${bare}$" if _LATEX.search(bare) or _BRACKETED.fullmatch(bare) else text


def _alone(answer: str) -> str:
    """Mark up an answer without its explanation: as one expression, unless it contains words (``18 eggs``)."""
    return f"The answer is {answer}" if _WORD.search(answer) and not _is_marked(answer) else _as_latex(answer)


def _as_latex(text: str) -> str:
    """Enclose text without LaTeX marks in ``$``, so that the library reads the whole text as one expression."""
    return text if _is_marked(text) else f"${text}$"


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))


_MONEY = re.compile(r"\\\$(?=\s*-?[\d.])")
_OPENING, _CLOSING = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)
_A = re.compile(r"^[^\S\n]*+A\s*+:\s*+(?=[-$\\(\[.\d])", re.MULTILINE)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_LEAD = re.compile(r"\\text\s*\{[^{}]*(?:\bis\b|\bare\b|:)\s*\}")  # words before the answer in its box
_INTRODUCTION = re.compile(r"(?:answer|result)(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
_WORDS = re.compile(r"^\s*(?:[A-Za-z]{2,}[,:]?\s+)+")
_LATEX = re.compile(r"\\(?!text|mathrm|,|;|:|!| )[A-Za-z]+")
_BRACKETED = re.compile(r"[(\[](?=[^A-Za-z,]*+,)[^A-Za-z]*+(?<=[)\]])")
