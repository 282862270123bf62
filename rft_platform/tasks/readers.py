"""Read rows from JSONL, JSON, CSV and Parquet files. Every error names the file and the line."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.tasks.splits import names_any_split, names_split

#: A row and its position: a line number in text files, a row number (from 1) in other files.
NumberedRow = tuple[int, dict[str, Any]]


def read_rows(path: Path) -> Iterator[NumberedRow]:
    """Rows of one data file, in order."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: data files end in {', '.join(_READERS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def split_files(folder: Path, split: str, subset_name: str | None) -> list[Path]:
    """The files of a split: ``train.jsonl``, or shards like ``train-00000-of-00002.parquet``, also below ``data/``.

    Without such files, a split has the files whose names contain a word for it (``my_dev.csv`` for ``validation``). If
    no file name contains a word for any split, all files belong to ``train``. ``datasets.load_dataset`` uses the same
    rules. ``subset_name`` is a subfolder of ``folder``.
    """
    root = folder / subset_name if subset_name and (folder / subset_name).is_dir() else folder
    for base in (root, root / "data"):
        files = [path for path in sorted(base.glob("*")) if path.suffix.lower() in _READERS]
        exact = [path for path in files if path.stem == split]
        if len(exact) > 1:
            raise UserError(f"{base}: {', '.join(path.name for path in exact)} all hold split {split!r}; name one file")
        found = exact or [path for path in files if path.stem.startswith(f"{split}-")]
        found = found or [path for path in files if names_split(path.stem, split)]
        if not found and split == "train" and not any(names_any_split(path.stem) for path in files):
            found = files  # no file name contains a split: train on all files
        if found:
            return found
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in _READERS)
    listing = ", ".join(names[:10]) if names else "no data file at all"
    raise UserError(f"{folder}: no file of split {split!r} (such as {split}.jsonl); found: {listing}")


_LONGEST_LINE = 1 << 24  # characters; a longer line is a damaged file, or no row that a model can read


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), ""), start=1):
            if len(line) > _LONGEST_LINE:
                raise UserError(f"{path}, line {number}: longer than {_LONGEST_LINE:,} characters; split or remove it")
            if line.strip():
                yield number, _object(path, number, _parse(path, line.rstrip(), first_line=number))


def _read_json(path: Path) -> Iterator[NumberedRow]:
    text = path.read_text(encoding="utf-8")
    if _are_lines(text):
        yield from _read_jsonl(path)
        return
    rows = _parse(path, text, first_line=1)
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of objects, got a {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield number, _object(path, number, row)


def _are_lines(text: str) -> bool:
    """Whether a JSON file holds one object per line."""
    first, _, rest = text.strip().partition("\n")
    return first.startswith("{") and first.rstrip().endswith("}") and rest.lstrip().startswith("{")


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Rows with the types that pandas infers for each column, as ``datasets.load_dataset`` does."""
    import pandas as pd

    lines = list(_csv_lines(path))
    if not lines:
        return
    frame = pd.read_csv(path, encoding="utf-8-sig", index_col=False, low_memory=False)
    if len(frame) != len(lines):
        raise UserError(f"{path}: has {len(lines)} rows by its commas and quotes, but pandas reads {len(frame)} rows")
    for number, row in zip(lines, frame.astype(object).to_dict("records"), strict=True):
        yield number, {str(name): None if value != value else value for name, value in row.items()}


def _csv_lines(path: Path) -> Iterator[int]:
    """The number of the last line of each row; UserError for a row with too many or too few fields."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} fields")
                yield reader.line_num
        except csv.Error as error:
            raise UserError(f"{path}, after line {reader.line_num}: not valid CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from None
    yield from enumerate(map(plain, rows), start=1)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row with values that JSON does not support (dates, decimals, bytes) converted to text."""
    return json.loads(json.dumps(row, default=str, ensure_ascii=False))


def _parse(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}, line {line}: not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{path}, line {first_line}: not readable JSON: nested too deep") from None
    except ValueError as error:  # a number with more digits than Python parses
        raise UserError(f"{path}, line {first_line}: not readable JSON: {error}") from None


def _object(path: Path, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: expected an object with named columns, got {str(row)[:60]!r}")
    return row


_READERS: dict[str, Callable[[Path], Iterator[NumberedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
