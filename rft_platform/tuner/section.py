"""What the settings of a tuning share."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict


class TunerSection(BaseModel):
    """A mapping of known fields, given by name. Unknown fields and values of the wrong kind are refused, also
    where a field is set later."""

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
            """Refuse positional arguments by a message that shows how it is meant."""
            if positional:
                name, known = type(self).__name__, ", ".join(type(self).model_fields)
                raise TypeError(f"{name} takes its fields by name, got {positional!r}; its fields are {known}")
            super().__init__(**fields)
