"""The interface of a destination of metrics: it gets optimiser steps and rounds, and repeated calls add nothing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rft_platform.model_registry.tracking import StepLike, flatten

Axis = Literal["optimizer_step", "round"]
Points = list[tuple[int, dict[str, float]]]
"""(x, values by metric name) of each step or round."""


class MetricSink(ABC):
    """The curves of one training of a project.

    ``key`` names a part of the curves, such as the steps of a round. A part that is written again with the same values
    adds no points. Values that are not numbers are left out.
    """

    def log_steps(self, key: str, steps: Iterable[StepLike], prefix: str = "train/") -> None:
        """Write the metrics of optimiser steps; the x axis is the step."""
        self.write(key, "optimizer_step", [(step.step, _numbers(step.metrics, prefix)) for step in steps])

    def log_round(self, key: str, number: int, metrics: Mapping[str, Any], prefix: str = "") -> None:
        """Write the metrics of round ``number``; the x axis is the round. Nested mappings get names with a slash."""
        self.write(key, "round", [(number, _numbers(dict(flatten(metrics, "/")), prefix))])

    @abstractmethod
    def write(self, key: str, axis: Axis, points: Points) -> None:
        """Write the points of ``key``."""


def _numbers(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        prefix + name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
