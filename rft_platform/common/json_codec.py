"""Strict and fast JSON for the bodies of model calls.

All bodies pass here, so pydantic's parser is used, which is several times as fast as the standard library's. Parsed
values hold valid UTF-8 text and are nested at most 200 levels deep. Later code therefore fails neither on half a
surrogate pair nor on the recursion limit.
"""

import json
from typing import Any, NoReturn

from pydantic_core import from_json, to_json


def parse(data: bytes | str) -> Any:
    """Parse JSON.

    Half a surrogate pair, which clients send when they cut an emoji in two, becomes U+FFFD. Raises ValueError for text
    that is not JSON (NaN and Infinity are not) or is nested more than 200 levels deep.
    """
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


def parse_object(data: bytes | str) -> dict[str, Any]:
    """As ``parse``, for a JSON object; raises ValueError for anything else."""
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, not {type(value).__name__}")
    return value


def _may_hold_half_pairs(data: bytes | str) -> bool:
    escape = b"\\ud" if isinstance(data, bytes) else "\\ud"
    return escape in data.lower()  # type: ignore[operator]


def _whole_characters(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
