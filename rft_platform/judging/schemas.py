"""Checking a value against a JSON schema."""

import json
from functools import lru_cache
from typing import Any

from rft_platform.errors import UserError


def allows(schema: str | dict[str, Any] | bool, value: Any) -> bool:
    """Whether a JSON schema (an object, or its text) allows a JSON value. Raises ValueError for what is no schema."""
    text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    return bool(_validator(text).is_valid(value))


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    try:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            "checking against a JSON schema needs the package jsonschema: pip install jsonschema"
        ) from error
    try:
        schema = json.loads(text)
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{text[:80]!r} is no JSON schema: {str(error).splitlines()[0]}") from error
    return kind(schema)
