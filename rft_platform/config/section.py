"""What every section of the configuration shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen mapping of known keys. An unknown key is refused; the text under a key is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
