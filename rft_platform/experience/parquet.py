"""Write and read the store's Parquet files: encoding, check of the schema, errors for broken files."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.common.errors import StorageError
from rft_platform.experience.notes import REPAIR
from rft_platform.experience.schema import check_schema
from rft_platform.object_store.mirror import fetch_missing

# Dictionary encoding pays off for repeated values; token ids and log-probs are compressed by zstd only.
_DICTIONARY = frozenset(
    {
        "task_id",
        "taskset",
        "group_id",
        "run_id",
        "engine",
        "template_hash",
        "finish_reason",
        "messages",
        "tools",
    }
)
# Statistics let readers skip files by number. On text columns with nulls they make DuckDB 2.0.0 answer IS NULL wrongly
# if all non-null values are equal (as is common in ``dropped_by``).
_STATISTICS = frozenset({"round", "step", "policy_version", "created_at", "run_reward", "reward", "advantage"})

# Row ids are random, so neither order nor statistics help to find a row by its id. With a Bloom filter (1.8 bytes per
# row) DuckDB checks a thousand files in a fifth of a second and reads only the file that holds the row.
_FALSE_POSITIVES = 0.001


def write_table(table: pa.Table, path: Path) -> None:
    """Write ``table`` with the store's encoding; ``path`` is a temporary file of the caller."""
    pq.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=[name for name in table.column_names if name in _DICTIONARY],
        write_statistics=[name for name in table.column_names if name in _STATISTICS],
        bloom_filter_options={"row_id": {"ndv": max(1, table.num_rows), "fpp": _FALSE_POSITIVES}},
    )


def read_tables(paths: Sequence[Path], expected: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    """The rows of some files in order, in schema ``expected``; ``columns`` limits what is read."""
    tables = [read_table(path, expected, columns) for path in paths]
    if tables:
        return pa.concat_tables(tables)
    return expected.empty_table() if columns is None else expected.empty_table().select(columns)


def read_table(path: Path, expected: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    """The rows of one file. Raises StorageError if the file is broken or has another record type or schema version."""
    fetch_unless_here(path)
    try:
        with pq.ParquetFile(path) as file:
            check_schema(file.schema_arrow, expected, str(path))
            names = columns or expected.names
            return file.read(columns=names).select(names).replace_schema_metadata(expected.metadata)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def footer(path: Path) -> pq.FileMetaData:
    """Row count and schema of a file, without its rows. Raises StorageError if the file cannot be read."""
    fetch_unless_here(path)
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def fetch_unless_here(path: Path) -> bool:
    """Bring a file that another home has stored here (``store_url``); returns whether it is here."""
    return path.exists() or (fetch_missing(path) and path.exists())


def unreadable(path: Path, error: Exception) -> StorageError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{path}: is missing: produce it again")
    return StorageError(f"{path}: cannot be read ({error}): {REPAIR}")
