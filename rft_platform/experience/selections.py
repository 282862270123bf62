"""The rows that a training took, one by one: a Parquet file beside the notes of its round."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rft_platform.common.files import atomic_path, digest_file
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.schema import RECORD_KEY, VERSION_KEY
from rft_platform.experience.store import ExperienceStore

ROW_SELECTION = "row_selection"  # stem of the file and its note

#: Use of a row. ``fresh`` and ``replay`` rows were trained on (``replay`` rows not for the first time); a filter of the
#: judgement dropped ``filtered`` rows; ``stale`` rows were sampled by weights that were too old.
FRESH, REPLAY, FILTERED, STALE = "fresh", "replay", "filtered", "stale"
TRAINED_ON = (FRESH, REPLAY)

SELECTION_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("group_id", pa.string()),
        ("round", pa.int32()),  # the round whose files hold the row
        ("judge_version", pa.string()),
        ("policy_version", pa.int64()),  # version of the weights that sampled the row
        ("use", pa.string()),
        ("uses", pa.int32()),  # number of earlier trainings that took the row
    ],
    metadata={RECORD_KEY: b"selection", VERSION_KEY: b"1"},
)


def selection_file(store: ExperienceStore, number: int, policy: str = DEFAULT_POLICY) -> Path:
    """Path of the selection of a policy's training in a round; the file may not exist."""
    return store.round_folder(number) / f"{ROW_SELECTION}-{policy}.parquet"


def selection_files(store: ExperienceStore, number: int) -> list[Path]:
    """The selection files of all policies in a round, here or on the project's object store."""
    folder = store.round_folder(number)
    named = (path.with_suffix(".parquet") for path in folder.glob(f"{ROW_SELECTION}*.json"))
    return sorted({*folder.glob(f"{ROW_SELECTION}*.parquet"), *(path for path in named if store.is_stored(path))})


def write_selection(
    store: ExperienceStore, number: int, rows: Sequence[dict[str, object]], policy: str = DEFAULT_POLICY
) -> str:
    """Write the rows that the training of a round takes, in the order given; returns the SHA-256 of the file."""
    target = selection_file(store, number, policy)
    with atomic_path(target) as temp:
        write_table(pa.Table.from_pylist(list(rows), SELECTION_SCHEMA), temp)
    return digest_file(target)


def read_selection(
    store: ExperienceStore, number: int, columns: list[str] | None = None, policy: str = DEFAULT_POLICY
) -> pa.Table:
    """The rows that the training of a round took; raises StorageError if the file is missing."""
    return read_table(selection_file(store, number, policy), SELECTION_SCHEMA, columns)
