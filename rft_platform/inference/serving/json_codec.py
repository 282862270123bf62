"""JSON of model calls: read with limits and written fast.

Every byte of every call passes here, so it is read and written by pydantic's parser, several times as fast as the
standard library's. What it gives is valid UTF-8 and nested at most 200 levels deep, so that nothing behind it fails on
half a character or runs out of stack.
"""

import json
from typing import Any, NoReturn

from pydantic_core import from_json, to_json


def parse(data: bytes | str) -> Any:
    """The value that ``data`` is the JSON of.

    Half a surrogate pair, which clients send for an emoji that they cut in two, becomes U+FFFD. Raises ValueError for
    text that is not JSON (NaN and Infinity are not) or is nested more than 200 levels deep.
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
