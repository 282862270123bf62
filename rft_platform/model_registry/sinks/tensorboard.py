"""Write step, round and evaluation metrics as TensorBoard event files.

    tensorboard --logdir RFT_HOME/tensorboard

A project's training is one TensorBoard run. A round writes one event file atomically, in a single pass. Writing a round
again replaces its file, so no curve has a step twice. Neither torch nor TensorFlow is needed.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from rft_platform.common.files import atomic_path
from rft_platform.model_registry.sinks.metric_sink import Axis, MetricSink, Points
from rft_platform.model_registry.tracking import warn_once

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
