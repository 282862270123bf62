"""Base class of all sections, a validator that accepts other names for a value, and the type of options."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


def aliases(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that replaces each alias (key of ``names``) by the value it stands for.

    Other values pass unchanged, so that the field's own validation reports a value of a wrong type.
    """

    def replaced(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    return BeforeValidator(replaced)


def _storable(options: dict[str, Any]) -> dict[str, Any]:
    for problem in _not_json(options, ""):
        raise PydanticCustomError("options", "{problem}", {"problem": problem})
    return options


def _not_json(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            inside = f"{place}.{key}" if place else str(key)
            if not isinstance(key, str):
                yield f"{inside}: the key {key!r} is not text, as JSON needs it: write {str(key)!r} with quotes"
            yield from _not_json(inner, inside)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{place}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place}: {value} is not a number of JSON: give a finite number"
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        yield f"{place}: {value} is a {kind}, and options are values of JSON: write text, with quotes in YAML"


#: Options of a function. They are values of JSON, so that the stored configuration has the values that were given.
Options = Annotated[dict[str, Any], AfterValidator(_storable)]


class Section(BaseModel):
    """A frozen mapping of known keys. Unknown keys are refused. The docstring below a key is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is expected: pydantic reads them as 1 and 0."""
        types = set(_leaf_types(cls.model_fields[info.field_name or ""].annotation))
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if types & {int, float} and bool not in types and any(isinstance(each, bool) for each in values):
            raise PydanticCustomError("number", "input should be a number, not true or false")
        return value


def _leaf_types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is composed of, without the metadata of ``Annotated``."""
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts[:1] if hasattr(annotation, "__metadata__") else parts:
        yield from _leaf_types(part)
