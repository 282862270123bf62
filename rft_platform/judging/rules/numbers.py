"""Judges that compare final numbers: ``numeric`` for any wording, ``gsm8k`` for the ``####`` convention.

``plain_notation`` normalises the spelling of numbers and signs in model-written text.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rft_platform.judging.response_text import reference_text, response_text

# Full-width ASCII, and the minus signs of Unicode; superscripts are kept.
_SPELLINGS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(map(ord, "−﹣"), ord("-"))
_SPACES = "  \u00a0\u2009\u202f"
_GROUPED = re.compile(rf"(?<![\d.,^])\d{{1,3}}(?:(?:[{_SPACES}]|\\[ ,;:!]|\{{,\}})\d{{3}})+(?!,?\d)(?![{_SPACES}]\d)")
_DECIMAL = r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)"
_SCIENTIFIC = re.compile(_DECIMAL + r"[eE]([+-]?\d{1,2})(?![\w.]*\w)")
_TIMES_TEN = re.compile(
    _DECIMAL + r"\s*(?:[×·*x]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d{1,2})\s*\}|([+-]?\d{1,2})(?!\d))"
)


def plain_notation(text: str) -> str:
    """Return ``text`` with ASCII digits and signs, joined thousands (``1 000``), ``1e3`` and ``2 × 10^3`` expanded."""
    if not text.isascii():
        text = text.translate(_SPELLINGS)
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _SCIENTIFIC.sub(_written_out, text)
    return _TIMES_TEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    digits, *exponents = match.groups()
    return f"{Decimal(digits).scaleb(int(next(filter(None, exponents)))):f}"


_NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)\]])[-−](?=[$€£¥\d.\\]))?     # a minus after a digit or a bracket is a subtraction
        [$€£¥]?[ ]?(?P<inner>(?<=[$€£¥])[-−])?
        (?: \\[dt]?frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}
          | (?P<number> (?:\d{1,3}(?:,\d{3})+(?!\d) | \d+)(?:\.\d+)? | \.\d+ )
            (?:[ ]?/[ ]?(?P<divisor>\d+(?![\d/,.])))? )""",
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
    separators (also spaces), currency, units (``5 m^2`` is 5), fractions, ``1e3``, ``2 × 10^3`` and ``10^3`` are
    understood. ``tolerance`` is absolute.
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
        numbers = list(_NUMBER.finditer(_simplified(part)))
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
    match = _NUMBER.search(_simplified(tail).rpartition("=")[2])
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    top = match["top"] or match["number"].replace(",", "")
    bottom = match["bottom"] or match["divisor"] or "1"
    if len(top) + len(bottom) > _MOST_DIGITS or int(bottom) == 0:
        return None
    value = Fraction(top) / int(bottom)
    return -value if match["sign"] or match["inner"] else value


def _reference(task: dict[str, Any], answer_key: str, read: Callable[[str], Fraction | None]) -> Fraction:
    text = reference_text(task, answer_key)
    number = read(text)
    if number is None:
        raise ValueError(f"the reference answer {text[:80]!r} holds no number to compare with")
    return number
