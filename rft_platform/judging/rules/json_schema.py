"""Validate a value against a JSON schema. Patterns of the schema are searched within a time limit."""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.judging.rules.pattern_search import search


def allows(schema: str | dict[str, Any] | bool, value: Any) -> bool:
    """Whether a JSON schema (an object, or its text) allows a JSON value.

    Raises ValueError for an invalid schema, PatternTimeoutError if one of its patterns takes too long.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)
    return bool(_validator(text).is_valid(value))


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    try:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            "checking against a JSON schema needs the package jsonschema: pip install jsonschema"
        ) from error
    try:
        schema = json.loads(text)
        kind = validator_for(schema)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{text[:80]!r} is not a JSON schema: {str(error).splitlines()[0]}") from error
    if isinstance(schema, dict):
        schema.pop("$schema", None)  # else a reference to the root would select the standard validator again
    if '"patternProperties"' not in text:
        return extend(kind, {"pattern": _pattern})(schema)
    if '"unevaluatedProperties"' in text:
        raise ValueError(
            f"the JSON schema {text[:80]!r} has both patternProperties and unevaluatedProperties, which cannot be "
            "checked within a time limit: use additionalProperties"
        )
    own = {"patternProperties": _pattern_properties, "additionalProperties": _additional_properties}
    return extend(kind, {"pattern": _pattern, **own})(schema)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``pattern``."""
    if validator.is_type(value, "string") and not search(pattern, value):
        yield _error(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``patternProperties``."""
    if validator.is_type(value, "object"):
        for pattern, own in patterns.items():
            for name in filter(lambda name: search(pattern, name), value):
                yield from validator.descend(value[name], own, path=name, schema_path=pattern)


def _additional_properties(validator: Any, own: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Keyword ``additionalProperties``: for names that neither ``properties`` nor ``patternProperties`` cover."""
    if validator.is_type(value, "object"):
        patterns = schema.get("patternProperties", {})
        for name in value.keys() - schema.get("properties", {}).keys():
            if not any(search(pattern, name) for pattern in patterns):
                yield from validator.descend(value[name], own, path=name)


def _error(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)
