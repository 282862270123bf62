"""JSON on its way through the recorder: every byte of every call passes here, so it is read and written by pydantic's
parser, several times as fast as the standard library's."""

import json
from typing import Any

from pydantic_core import from_json, to_json


def parse(data: bytes) -> Any:
    """The value that ``data`` is the JSON of; ValueError where it is none."""
    try:
        return from_json(data)
    except ValueError:
        return json.loads(data)  # half a surrogate pair, which only this one lets pass


def dump(value: Any) -> bytes:
    """``value`` as JSON."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value).encode()


def parse_object(data: bytes) -> dict[str, Any]:
    """The same of a JSON object; ValueError for anything else."""
    value = parse(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, not {type(value).__name__}")
    return value
