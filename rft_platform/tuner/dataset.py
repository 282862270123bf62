"""Settings of the tasks on which a model is tuned or evaluated."""

import json
from itertools import islice
from typing import Any

from pydantic import Field

from rft_platform.tuner.section import TunerSection


class DatasetConfig(TunerSection):
    """A dataset that ``datasets.load_dataset(path, name, split)`` can load; each row is the ``task`` of a run."""

    path: str = Field(min_length=1)
    """A folder with files such as train.jsonl, a JSONL, JSON, CSV or Parquet file, or a Hugging Face name."""
    name: str | None = None
    """Subset: a configuration of a Hugging Face dataset, or a folder inside ``path``."""
    split: str | None = "train"
    """A split; also a slice or a sum of splits: ``train[:100]``, ``train+test``."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    total_steps: int | None = Field(default=None, ge=1)
    """Training steps of ``batch_size`` tasks; overrides ``total_epochs``."""

    @property
    def split_or_train(self) -> str:
        """The split; ``train`` if none is named."""
        return self.split or "train"

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print the first ``n`` rows as JSON and return them. Raises UserError if the dataset cannot be read."""
        from rft_platform.tasks.sources import located_rows

        rows = [row for _, _, row in islice(located_rows(self.path, self.split_or_train, self.name), n)]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return rows
