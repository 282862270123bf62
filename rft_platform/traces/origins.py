"""Which traces of other tools rows were imported from: read from datasets and from the tasks of a home's imports."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.tasks.dataset import task_id_of
from rft_platform.tasks.readers import read_rows
from rft_platform.tasks.task import ORIGIN


@dataclass(frozen=True, slots=True)
class Origin:
    """A trace that a row was imported from."""

    id: str  # that of the tracing tool
    format: str
    imported_as: str  # the import
    link: str | None = None  # the trace's page


def origins_of(cell: Any) -> list[Origin]:
    """The traces in a cell of the column ``imported_from``, which may be JSON text; none for any other content."""
    return [_origin(one) for one in entries_of(cell)]


def entries_of(cell: Any) -> list[Mapping[str, Any]]:
    """The same as they are stored, with their subjects."""
    try:
        found = json.loads(cell) if isinstance(cell, str) else cell
    except ValueError:
        return []
    return [one for one in found if _is_origin(one)] if isinstance(found, list) else []


def distinct_origins(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """The origins without repetitions, in their order."""
    return tuple({(one.format, one.id): one for one in origins}.values())


def dataset_origins(file: Path) -> tuple[Origin, ...]:
    """The traces of the rows of a Parquet file that a training read.

    Empty if the file has no such column, is gone or is damaged: who reads its rows reports that.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        named = file.exists() and ORIGIN in pq.read_schema(file).names
        cells = pq.read_table(file, columns=[ORIGIN])[ORIGIN].to_pylist() if named else []
    except (pa.ArrowException, OSError):
        return ()
    return distinct_origins(origin for cell in cells for origin in origins_of(cell))


def task_origins(folder: Path) -> dict[str, list[Origin]]:
    """The traces of the tasks in the files of ``folder``, by task id."""
    found: dict[str, list[Origin]] = defaultdict(list)
    for file in sorted(folder.glob("train-*.jsonl")):
        for _, row in read_rows(file):
            found[task_id_of(row)] += origins_of(row.get(ORIGIN))
    return found


def _is_origin(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("id"), str) and "format" in one


def _origin(one: Mapping[str, Any]) -> Origin:
    return Origin(one["id"], str(one["format"]), str(one.get("imported_as", "")), one.get("link"))
