"""Descriptions of the keys of ``rft.yaml``, read from the schema: type, default, bounds and meaning.

For editors there is the JSON schema; a configuration file names it in its first line.
"""

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rft_platform.common.files import write_text
from rft_platform.config.schema.rft_config import RftConfig

#: Name of the JSON schema beside a configuration file, so that editors need no network.
SCHEMA_FILE = "rft.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"

_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Any: "any value",
    dict: "mapping",
}
_BOUNDS: dict[type, tuple[str, str]] = {Ge: ("ge", "≥ {}"), Gt: ("gt", "> {}"), Le: ("le", "≤ {}"), Lt: ("lt", "< {}")}
_LENGTHS: dict[type, tuple[str, str]] = {
    MinLen: ("min_length", "at least {} long"),
    MaxLen: ("max_length", "at most {} long"),
}


def keys(prefix: str = "", section: type[BaseModel] = RftConfig) -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field, in the order of the schema; ``[]`` marks the entries of a list."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{written_name(name, field)}"
        yield key, field
        for inner in sections_of(field.annotation):
            yield from keys(f"{key}{'[]' if is_list(field.annotation) else ''}.", inner)


def written_name(name: str, field: FieldInfo) -> str:
    """The key as users write it; the first alias where the name is one of Python's alone."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        texts = [choice for choice in alias.choices if isinstance(choice, str)]
        return name if name in texts or not texts else texts[0]
    return alias if isinstance(alias, str) else name


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key holds: itself, one that may be missing, or those of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not Literal:
        seen: set[type[BaseModel]] = set()
        for part in typing.get_args(annotation):
            for found in sections_of(part):
                if found not in seen:
                    seen.add(found)
                    yield found


def is_list(annotation: Any) -> bool:
    """Whether a key holds a list, or may hold one."""
    if typing.get_origin(annotation) is list:
        return True
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return union and any(is_list(part) for part in typing.get_args(annotation))


def type_of(field: FieldInfo) -> str:
    """The type of a key with its bounds, as Markdown."""
    bounds = [
        form.format(_number(getattr(item, attribute)))
        for item in field.metadata
        for kind, (attribute, form) in {**_BOUNDS, **_LENGTHS}.items()
        if isinstance(item, kind)
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        bounds = [
            form.format(_number(getattr(item, attribute)))
            for item in parts[1:]
            for kind, (attribute, form) in _BOUNDS.items()
            if isinstance(item, kind)
        ]
        return " ".join([_kind(parts[0]), *bounds])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys("null" if part is type(None) else _kind(part) for part in parts))
    if origin in (list, tuple):
        return f"list of {_kind(parts[0])}" if origin is list else _tuple(parts)
    if origin is dict:
        return f"mapping to {_kind(parts[1])}"
    return _NAMES.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _tuple(parts: tuple[Any, ...]) -> str:
    """The entries of a list of fixed length, or what a list of any length holds."""
    return f"list of {_kind(parts[0])}" if parts[1:] == (...,) else f"[{', '.join(map(_kind, parts))}]"


def default_of(field: FieldInfo) -> str:
    """The default of a key, as Markdown; ``required`` without one."""
    if field.default_factory is not None:
        value: Any = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return "required"
    else:
        value = field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`{[*value]}`" if value else "`[]`"
    if isinstance(value, float | int):
        return f"`{_number(value)}`"
    return f'`"{value}"`' if value in ("", " ") else f"`{value}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def one_line(description: str) -> str:
    """One line of Markdown: the code marks of docstrings become those of Markdown."""
    return re.sub(r"\s+", " ", description.replace("``", "`")).strip()


def json_schema() -> dict[str, Any]:
    """The JSON schema of ``rft.yaml``: this platform's names, without the other names that files of Trinity-RFT use."""
    schema = RftConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_with_expressions(schema)}


def write_with_schema(file: Path, text: str) -> None:
    """Write a configuration file whose first line names the JSON schema, and the schema beside it. Idempotent."""
    content = {file.parent / SCHEMA_FILE: f"{json.dumps(json_schema(), indent=1)}\n", file: EDITOR_LINE + text}
    for target, new in content.items():
        if not target.exists() or target.read_text(encoding="utf-8") != new:
            write_text(target, new)


def _with_expressions(node: Any) -> Any:
    """Let an expression such as ``${oc.env:NAME}`` take the place of any value but a mapping."""
    if isinstance(node, list):
        return [_with_expressions(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    inner = {key: value if key in ("default", "enum") else _with_expressions(value) for key, value in node.items()}
    chosen = "enum" in inner or "const" in inner
    if not chosen and inner.get("type") not in ("integer", "number", "boolean", "array"):
        return inner
    outer = {key: inner.pop(key) for key in ("title", "description", "default") if key in inner}
    return {**outer, "anyOf": [inner, {"type": "string", "pattern": r"\$\{"}]}
