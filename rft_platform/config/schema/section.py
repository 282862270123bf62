"""Base class of all sections of the configuration."""

from pydantic import BaseModel, ConfigDict


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
