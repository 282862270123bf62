"""Which rows a training took, row by row: one Parquet file beside the notes of its round."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.schema import RECORD_KEY, VERSION_KEY
from rft_platform.experience.store import ExperienceStore
from rft_platform.files import atomic_path

NAME = "row_selection"  # of the file and of the note about it; those of a further policy end in its name

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


def selection_name(policy: str | None = None) -> str:
    """What the selections of a policy are called; None: the first policy's."""
    return NAME if policy is None else f"{NAME}-{policy}"


def selection_file(store: ExperienceStore, number: int, policy: str | None = None) -> Path:
    """Where the selection of a round's training of a policy lies or would lie."""
    return store.round_folder(number) / f"{selection_name(policy)}.parquet"


def selection_files(store: ExperienceStore, number: int) -> list[Path]:
    """The selections of all policies that there are."""
    return sorted(store.round_folder(number).glob(f"{NAME}*.parquet"))


def write_selection(
    store: ExperienceStore, number: int, rows: Sequence[dict[str, object]], policy: str | None = None
) -> Path:
    """Write what the training of a round takes; rows are in the order in which they were chosen."""
    target = selection_file(store, number, policy)
    with atomic_path(target) as temp:
        write_table(pa.Table.from_pylist(list(rows), SELECTION_SCHEMA), temp)
    return target


def read_selection(
    store: ExperienceStore, number: int, columns: list[str] | None = None, policy: str | None = None
) -> pa.Table:
    """What the training of a round took; StorageError where that is not there."""
    return read_table(selection_file(store, number, policy), SELECTION_SCHEMA, columns)
