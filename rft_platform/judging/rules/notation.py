"""Normalise the spelling of numbers and signs in model-written text."""

import re
from decimal import Decimal

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
