"""Strict and fast JSON for the bodies of model calls.

pydantic's parser is used, because it is several times as fast as the standard library's. Parsed values hold valid UTF-8
text and are nested at most 200 levels deep, so later code fails neither on half a surrogate pair nor on the recursion
limit.
"""

import json
import math
import re
from typing import Any, NoReturn

from pydantic_core import from_json, to_json

LARGE_BYTES = 100_000  #: servers parse and write JSON above this size outside the event loop's thread

#: A number beyond the largest float has a positive exponent or some 300 digits; text without these needs no check.
#: Every digit becomes 0 and E becomes e, so that three searches for fixed bytes find such a number.
_DIGITS_AS_0 = bytes.maketrans(b"123456789E", b"000000000e")
_EXPONENTS, _MANY_DIGITS = (b"0e0", b"0e+"), b"0" * 300
_NUL = b"\\u0000"
_NUL_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # after an odd number of backslashes u0000 is plain text


def parse(data: bytes | str) -> Any:
    """Parse JSON.

    Half a surrogate pair, which clients send when they cut an emoji in two, becomes U+FFFD. Raises ValueError for text
    that is not JSON (NaN and Infinity are not), has a number beyond the largest float, or is nested more than 200
    levels deep.
    """
    value = _parsed(data)
    if _may_be_large(data) and not _is_finite(value):
        raise ValueError("a number is beyond the largest float, 1.8e308")
    return value


def _parsed(data: bytes | str) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if not _may_hold_half_pairs(data):
            raise
        try:
            text = json.dumps(json.loads(data, parse_constant=_refuse_constant), ensure_ascii=False)
        except RecursionError:
            raise error from None
        return from_json(_whole_characters(text), allow_inf_nan=False)


def dump(value: Any) -> bytes:
    """``value`` as JSON."""
    try:
        return to_json(value)
    except ValueError:  # half a surrogate pair
        return _whole_characters(json.dumps(value, ensure_ascii=False)).encode()


def has_nul(data: bytes) -> bool:
    """Whether a text in JSON that ``parse`` accepts contains NUL, which PostgreSQL does not store."""
    # JSON in UTF-8 has no NUL byte; JSON in UTF-16, which hides the escape from the pattern, always has one
    return b"\0" in data or (_NUL in data and _NUL_ESCAPE.search(data) is not None)


def parse_object(data: bytes | str) -> dict[str, Any]:
    """As ``parse``, for a JSON object; raises ValueError for anything else."""
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, not {type(value).__name__}")
    return value


def _may_be_large(data: bytes | str) -> bool:
    """Whether a text may have a number beyond the largest float. Every body of a model call passes here."""
    plain = (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).translate(_DIGITS_AS_0)
    return (b"0e" in plain and any(each in plain for each in _EXPONENTS)) or _MANY_DIGITS in plain


def _is_finite(value: Any) -> bool:
    """Whether no number in a parsed value is infinite."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, float) and not math.isfinite(each):
            return False
    return True


def _may_hold_half_pairs(data: bytes | str) -> bool:
    escape = b"\\ud" if isinstance(data, bytes) else "\\ud"
    return escape in data.lower()  # type: ignore[operator]


def _whole_characters(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
