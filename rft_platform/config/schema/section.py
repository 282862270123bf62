"""Base class of all sections of the configuration, and a validator that accepts other names for a value."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def aliases(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that replaces each alias (key of ``names``) by the value it stands for.

    Other values pass unchanged, so that the field's own validation reports a value of a wrong type.
    """

    def replaced(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    return BeforeValidator(replaced)


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
