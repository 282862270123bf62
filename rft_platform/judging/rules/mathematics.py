"""Judges that compare numbers and mathematical answers by value.

``math`` accepts any notation (library math-verify), ``numeric`` any wording of a final number, ``gsm8k`` the ``####``
convention. ``plain_notation`` normalises the spelling of numbers and signs in model-written text.
"""

import logging
import os
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import reference_text, response_text
from rft_platform.judging.sandbox.bounded_call import LimitExceededError, call_bounded
from rft_platform.tasks.enclosed_text import last_enclosed

# Full-width ASCII, and the minus signs of Unicode; superscripts are kept.
_SPELLINGS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(map(ord, "−﹣"), ord("-"))
_SPACES = "  \u00a0\u2009\u202f"
_GROUPED = re.compile(  # consumed as a whole, so that a long list of numbers takes linear time; ``more``: a list
    rf"(?<![\d.,^])\d{{1,3}}(?:(?:[{_SPACES}]|\\[ ,;:!]|\{{,\}})\d{{3}})++(?P<more>(?=,?\d|[{_SPACES}]\d))?"
)
_DECIMAL = r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)"
_SCIENTIFIC = re.compile(_DECIMAL + r"[eE]([+-]?\d{1,2})(?![\w.]*\w)")
_TIMES_TEN = re.compile(
    _DECIMAL + r"\s*(?:[×·*x]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d{1,2})\s*\}|([+-]?\d{1,2})(?!\d))"
)


def plain_notation(text: str) -> str:
    """Return ``text`` with ASCII digits and signs, joined thousands (``1 000``), ``1e3`` and ``2 × 10^3`` expanded."""
    if not text.isascii():
        text = text.translate(_SPELLINGS)
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]) if match["more"] is None else match[0], text)
    text = _SCIENTIFIC.sub(_written_out, text)
    return _TIMES_TEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    digits, *exponents = match.groups()
    return f"{Decimal(digits).scaleb(int(next(filter(None, exponents)))):f}"


_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w)\]])[-−](?=[$€£¥\d.\\]))?     # a minus after a digit or a bracket is a subtraction
        [$€£¥]?[ ]?(?P<inner>(?<=[$€£¥])[-−])?
        (?: (?:(?P<whole>{_WHOLE})[ ]*)? \\[dtc]?frac\s*    # LaTeX: an argument is one digit or in braces
            (?:(?P<top>\d) | \{{\s*(?P<long_top>[-−]?{_WHOLE})\s*\}}) \s*
            (?:(?P<bottom>\d) | \{{\s*(?P<long_bottom>{_WHOLE})\s*\}}) (?!\d)
          | (?P<no_number> (?:{_WHOLE}[ ]*)? \\[dtc]?frac (?:\s*(?:{_GROUP}|\\[A-Za-z]+|[^\s{{}}\\])){{0,2}} \d* )
          | (?P<number> {_WHOLE} | \.\d+ ) (?:[ ]?/[ ]?(?P<divisor>\d+(?![\d/,.])))? )""",
    re.VERBOSE,
)
_POWER = re.compile(r"(?<![\w.^])(\d+)(?:\^\{(\d+)\}|\^(\d+)|\*\*(\d+))(?![\d*])")
_MARK = re.compile(  # an exponent or an index of a symbol; ``**`` before and after a number is Markdown
    r"(?<=[A-Za-z)\]}])(?:(?:\^|_)(?:\{[^{}]*\}|[-+]?\d+(?:\.\d+)?)|\*\*\d+(?![\d*]))"
)
_HASHES = re.compile(r"####\s*([^\n]*)")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_ANSWER = re.compile(r"(?<![A-Za-z])(?:(?:A|Answer|ANSWER)\s*[:：]|answer is\s*[:：]?)\s*([^\n]*)")
_TAIL = 500  # characters at the end that usually contain the last number
_MOST_DIGITS = 100  # a longer run of digits is no answer, and costly to compare


def numeric(task: dict[str, Any], response: Any, *, answer_key: str = "answer", tolerance: float = 0.0) -> float:
    """1.0 when the final number of the response equals that of the reference, else 0.0.

    Four places are tried in this order: after ``####``, in ``\\boxed{}``, after ``A:`` or ``Answer:``, and the end of
    the text. The first place that exists counts; if it occurs several times, the last occurrence. Signs, thousands
    separators (also spaces), currency, units (``5 m^2`` is 5), fractions (also ``\\frac12``, ``1\\frac{1}{2}``),
    ``1e3``, ``2 × 10^3`` and ``10^3`` are understood. A ``\\frac`` of anything but numbers is no number.
    ``tolerance`` is absolute.
    """
    expected = _reference(task, answer_key, final_number)
    given = final_number(response_text(response))
    return float(given is not None and abs(given - expected) <= Fraction(tolerance))


def gsm8k(task: dict[str, Any], response: Any, *, answer_key: str = "answer", strict: bool = False) -> float:
    """1.0 when the final number of the response equals the number after ``####`` of a GSM8K solution, else 0.0.

    ``strict``: the response must also give its number after ``####``; otherwise any place of ``numeric`` counts.
    """
    expected = _reference(task, answer_key, hash_number)
    text = response_text(response)
    given = hash_number(text) if strict else final_number(text)
    return float(given == expected)


def final_number(text: str) -> Fraction | None:
    """Return the final number of a text, or None."""
    for marker in (_HASHES, _BOXED, _ANSWER):
        tails = marker.findall(text)
        if tails:
            return _first_number(tails[-1])
    for part in (text[-_TAIL:], text):
        numbers = _numbers(_simplified(part))
        if len(numbers) > 1 or part == text:  # the first number of a tail may be cut
            return _value(numbers[-1]) if numbers else None
    return None


def hash_number(text: str) -> Fraction | None:
    """Return the number after the last ``####``, or None."""
    tails = _HASHES.findall(text)
    return _first_number(tails[-1]) if tails else None


def _simplified(text: str) -> str:
    """Normalise numbers: replace powers of numbers by their values, and remove exponents and indices of symbols."""
    return _MARK.sub("", _POWER.sub(_power, plain_notation(text)))


def _power(match: re.Match[str]) -> str:
    base, exponent = match[1], next(filter(None, match.groups()[1:]))
    fits = len(exponent) <= 3 and len(base) * int(exponent) <= _MOST_DIGITS
    return str(int(base) ** int(exponent)) if fits else ""


def _first_number(tail: str) -> Fraction | None:
    """Return the first number of an answer, or of the part after its last equals sign."""
    numbers = _numbers(_simplified(tail).rpartition("=")[2])
    return _value(numbers[0]) if numbers else None


def _numbers(text: str) -> list[re.Match[str]]:
    return [match for match in _NUMBER.finditer(text) if match["no_number"] is None]


def _value(match: re.Match[str]) -> Fraction | None:
    def digits(default: str, *names: str) -> str:
        return next((match[name] for name in names if match[name]), default).replace(",", "").replace("−", "-")

    whole, top = digits("0", "whole"), digits("0", "top", "long_top", "number")
    bottom = digits("1", "bottom", "long_bottom", "divisor")
    if len(whole) + len(top) + len(bottom) > _MOST_DIGITS or Fraction(bottom) == 0:
        return None
    value = Fraction(top) / Fraction(bottom)
    if match["whole"]:
        if not (whole.isdigit() and top.isdigit() and bottom.isdigit() and value < 1):
            return None  # a product, not a mixed number
        value += int(whole)
    return -value if match["sign"] or match["inner"] else value


def _reference(task: dict[str, Any], answer_key: str, read: Callable[[str], Fraction | None]) -> Fraction:
    text = reference_text(task, answer_key)
    number = read(text)
    if number is None:
        raise ValueError(f"the reference answer {text[:80]!r} holds no number to compare with")
    return number


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
