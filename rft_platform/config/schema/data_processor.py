"""Section ``data_processor``: processing of experiences between judgement and training."""

from typing import Any

from pydantic import Field

from rft_platform.config.schema.section import Section


class OperatorConfig(Section):
    """One operator of the experience pipeline."""

    name: str
    """Built-in name, a name that a plugin registers, or ``package.module:function``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the operator."""


class ExperiencePipeline(Section):
    """Operators on judged experiences, applied in this order before advantages are computed."""

    operators: list[OperatorConfig] = Field(default_factory=list)
    """They run after the algorithm's own operators. An operator with the same name replaces the algorithm's own."""


class DataProcessor(Section):
    """Processing of data between exploration and training."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()
