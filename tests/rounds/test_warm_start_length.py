"""The length of a warm start: steps, or passes over its demonstrations."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.config.schema.trainer import WarmStart
from rft_platform.rounds.warm_start import _with_steps


def test_epochs_replace_the_number_of_steps(tmp_path: Path) -> None:
    demonstrations = tmp_path / "demonstrations.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 10}), demonstrations)
    given = WarmStart(path="unused", batch_size=4, steps=7)
    assert _with_steps(given, demonstrations).steps == 7
    assert _with_steps(given.model_copy(update={"epochs": 3}), demonstrations).steps == 8  # 30 rows of 4
