"""Base class of the settings of ``tune()``."""

import difflib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from rft_platform.errors import UserError


class TunerSection(BaseModel):
    """Settings with known fields, given by name.

    Unknown fields and values of the wrong type are refused, also when a field is set later.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, *positional: Any, **fields: Any) -> None:
            """Refuse positional arguments with a message that names the fields."""
            if positional:
                name, known = type(self).__name__, ", ".join(type(self).model_fields)
                raise TypeError(f"{name} takes its fields by name, got {positional!r}; its fields are {known}")
            if unknown := [field for field in fields if field not in type(self).model_fields]:
                raise TypeError(_unknown_field(type(self), unknown[0]))
            super().__init__(**fields)


def check_argument_types(**arguments: tuple[Any, type[TunerSection]]) -> None:
    """Raise UserError for an argument, given with its expected type, that is neither of that type nor None."""
    for name, (value, expected) in arguments.items():
        if value is not None and not isinstance(value, expected):
            first = next(iter(expected.model_fields))
            raise UserError(f"tune: {name} is {value!r}; expected {expected.__name__}({first}=...)")


def _unknown_field(section: type[TunerSection], field: str) -> str:
    """Message for a field that ``section`` does not have."""
    near = difflib.get_close_matches(field, section.model_fields, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(section.model_fields)
    return f"{section.__name__} has no field {field!r}: {meant}its fields are {known}"
