"""Destinations of step, round and evaluation metrics beside MLflow, with one interface; repeated calls add nothing.

All destinations get the same names and x axes as MLflow, except for characters that MLflow does not allow. Here is the
one that the platform needs itself, TensorBoard's event files (``tensorboard --logdir RFT_HOME/tensorboard``): a
training is one TensorBoard run, and a round writes one file atomically, in a single pass. Writing a round again
replaces its file, so no curve has a step twice. Neither torch nor TensorFlow is needed.

All others are entry points of the group ``rft_platform.metric_sinks``: those of ``experiment_trackers``, and those of
other packages. An entry point names a function ``(folder, project, name, config) -> MetricSink | None``;
``monitor.monitor_type`` selects it by its name.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rft_platform.common.files import atomic_path
from rft_platform.model_registry.tracking import StepLike, flatten, warn_once

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


_UNSAFE = re.compile(r"[^\w.\-]")


class TensorBoardRun(MetricSink):
    """The event files of one training of a project, below ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / _UNSAFE.sub("_", name)

    def write(self, key: str, axis: Axis, points: Points) -> None:
        """Replace the file of ``key``. TensorBoard finds event files by ``tfevents`` in the name."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        file = self.folder / f"events.out.tfevents.{_UNSAFE.sub('_', key)}"
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as temp, temp.open("wb") as out:
            records = RecordWriter(out)
            for event in _events(points):
                records.write(event)
            records.flush()


def _events(points: Points) -> Iterator[bytes]:
    """Yield serialised events: first the format version, then one per step with all its scalars."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    now = time.time()
    yield Event(wall_time=now, file_version="brain.Event:2").SerializeToString()
    for step, scalars in points:
        summary = Summary()
        for name, value in scalars.items():
            try:
                summary.value.append(Summary.Value(tag=name, simple_value=value))
            except ValueError as error:  # a name that UTF-8 cannot encode
                warn_once("TensorBoard", f"the metric {name!r}", str(error))
        yield Event(wall_time=now, step=step, summary=summary).SerializeToString()
