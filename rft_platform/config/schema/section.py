"""Base class of all sections of the configuration, and other names of values."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def aliases(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that replaces other names of a value; values of a wrong type are left for the validation."""

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
