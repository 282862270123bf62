"""Which rows a training took, row by row: one Parquet file beside the notes of its round."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.schema import RECORD_KEY, VERSION_KEY
from rft_platform.experience.store import ExperienceStore
from rft_platform.files import atomic_path

FILE = "row_selection.parquet"

#: What became of a row: ``fresh`` and ``replay`` rows were trained on (the latter not for the first time); ``filtered``
#: ones were left out by a filter of the judgement, ``stale`` ones because the weights that sampled them were too old.
FRESH, REPLAY, FILTERED, STALE = "fresh", "replay", "filtered", "stale"
TRAINED_ON = (FRESH, REPLAY)

SELECTION_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("group_id", pa.string()),
        ("round", pa.int32()),  # the round whose files hold the row
        ("judge_version", pa.string()),
        ("policy_version", pa.int64()),  # that sampled it
        ("use", pa.string()),
        ("uses", pa.int32()),  # trainings that had taken it before
    ],
    metadata={RECORD_KEY: b"selection", VERSION_KEY: b"1"},
)


def selection_file(store: ExperienceStore, number: int) -> Path:
    """Where the selection of a round's training lies or would lie."""
    return store.round_folder(number) / FILE


def write_selection(store: ExperienceStore, number: int, rows: Sequence[dict[str, object]]) -> Path:
    """Write what the training of a round takes; rows are in the order in which they were chosen."""
    target = selection_file(store, number)
    with atomic_path(target) as temp:
        write_table(pa.Table.from_pylist(list(rows), SELECTION_SCHEMA), temp)
    return target


def read_selection(store: ExperienceStore, number: int, columns: list[str] | None = None) -> pa.Table:
    """What the training of a round took; StorageError where that is not there."""
    return read_table(selection_file(store, number), SELECTION_SCHEMA, columns)
