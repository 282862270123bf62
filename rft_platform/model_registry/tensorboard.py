"""Write step, round and evaluation metrics as TensorBoard event files, beside or instead of MLflow's step metrics.

    tensorboard --logdir RFT_HOME/tensorboard

A project's training is one TensorBoard run. A round writes one event file atomically, in a single pass. Writing a round
again replaces its file, so no curve has a step twice. Neither torch nor TensorFlow is needed.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rft_platform.common.files import atomic_path
from rft_platform.model_registry.tracking import StepLike, flatten

_UNSAFE = re.compile(r"[^\w.\-]")


class TensorBoardRun:
    """The event files of one training of a project, below ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / _UNSAFE.sub("_", name)

    def log_steps(self, key: str, steps: Iterable[StepLike], prefix: str = "train/") -> Path:
        """Write the metrics of optimiser steps to the file of ``key`` (a round), replacing an earlier one."""
        return self._write(key, ((step.step, _named(step.metrics, prefix)) for step in steps))

    def log_round(self, key: str, number: int, metrics: Mapping[str, Any], prefix: str = "") -> Path:
        """Write the metrics of round ``number`` to the file of ``key``; values that are not numbers are left out."""
        return self._write(key, [(number, _named(dict(flatten(metrics, "/")), prefix))])

    def _write(self, key: str, values: Iterable[tuple[int, dict[str, float]]]) -> Path:
        """Write one event file. TensorBoard finds event files by ``tfevents`` in the name and reads them by name."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        file = self.folder / f"events.out.tfevents.{_UNSAFE.sub('_', key)}"
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as temp, temp.open("wb") as out:
            records = RecordWriter(out)
            for event in _events(values):
                records.write(event)
            records.flush()
        return file


def _events(values: Iterable[tuple[int, dict[str, float]]]) -> Iterator[bytes]:
    """Yield serialised events: first the format version, then one per step with all its scalars."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    now = time.time()
    yield Event(wall_time=now, file_version="brain.Event:2").SerializeToString()
    for step, scalars in values:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])
        yield Event(wall_time=now, step=step, summary=summary).SerializeToString()


def _named(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        prefix + name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
