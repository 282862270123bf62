"""Section ``data_processor``: what is done with experiences between their judgement and training."""

from typing import Any

from pydantic import Field

from rft_platform.config.section import Section


class OperatorConfig(Section):
    """One operator of the experience pipeline."""

    name: str
    """Built-in name, one that a plugin registers, or ``package.module:function``."""
    args: dict[str, Any] = Field(default_factory=dict)


class ExperiencePipeline(Section):
    """Operators on judged experiences, applied in this order before advantages are made."""

    operators: list[OperatorConfig] = Field(default_factory=list)
    """They follow those of the algorithm; one takes the place of the algorithm's own of the same name."""


class DataProcessor(Section):
    """Processing of data on its way."""

    experience_pipeline: ExperiencePipeline = ExperiencePipeline()
