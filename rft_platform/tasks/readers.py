"""Read rows from JSONL, JSON, CSV and Parquet files. Every error names the file and the line.

Split expressions have the syntax of ``datasets.load_dataset``: ``train[:100]``, ``train[10%:20%]``, ``a+b``.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rft_platform.common.errors import UserError

Row = TypeVar("Row")

_PART = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")

#: Synonyms of a split in file names.
ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


#: Files of a folder that describe its dataset or model; ``datasets`` ignores them, too.
_NO_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One split, or a slice of it. Bounds are texts as written (``100``, ``-5``, ``10%``), or None."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole split."""
        return self.start is None and self.stop is None

    def of(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The slice of a split's rows; percentages are rounded to the nearest row."""
        return rows[_bound(self.start, len(rows)) : _bound(self.stop, len(rows))]


def split_parts(expression: str) -> list[SplitPart]:
    """The splits of an expression, which are concatenated; UserError for an invalid expression."""
    parts = []
    for text in expression.split("+"):
        match = _PART.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f"split {expression!r}: expected the name of a split, perhaps with a slice, as in train, train[:100], "
                "train[10%:20%] or train+test"
            )
        parts.append(SplitPart(match["name"], match["start"], match["stop"]))
    return parts


def words_for(split: str) -> tuple[str, ...]:
    """The words that mark a file name as part of ``split``."""
    return next((words for words in ALIASES.values() if split in words), (split,))


def names_split(stem: str, split: str) -> bool:
    """Whether a file name without suffix contains a word for ``split``, in any case, separated from other letters."""
    patterns = (rf"(^|[-._ \d]){re.escape(word)}($|[-._ \d])" for word in words_for(split))
    return any(re.search(pattern, stem, re.IGNORECASE) for pattern in patterns)


def names_any_split(stem: str) -> bool:
    """Whether a file name contains a word for one of the usual splits."""
    return any(names_split(stem, split) for split in ALIASES)


def _bound(text: str | None, count: int) -> int | None:
    if text is None:
        return None
    return round(count * int(text[:-1]) / 100) if text.endswith("%") else int(text)


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
    no file name contains a word for any split, all files belong to ``train``, but those that describe a dataset or
    model (``config.json``). ``datasets.load_dataset`` uses the same rules; here the case of letters is ignored.
    ``subset_name`` is a subfolder of ``folder``.
    """
    root = _subfolder(folder, subset_name) if subset_name else folder
    for base in (root, root / "data"):
        files = [
            path for path in sorted(base.glob("*")) if path.suffix.lower() in _READERS and path.name not in _NO_DATA
        ]
        exact = [path for path in files if path.stem.casefold() == split.casefold()]
        if len(exact) > 1:
            raise UserError(f"{base}: {', '.join(path.name for path in exact)} all hold split {split!r}; name one file")
        found = exact or [path for path in files if path.stem.casefold().startswith(f"{split}-".casefold())]
        found = found or [path for path in files if names_split(path.stem, split)]
        if not found and split == "train" and not any(names_any_split(path.stem) for path in files):
            found = files  # no file name contains a split: train on all files
        if found:
            return found
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in _READERS)
    listing = ", ".join(names[:10]) if names else "no data file at all"
    raise UserError(f"{folder}: no file of split {split!r} (such as {split}.jsonl); found: {listing}")


def _subfolder(folder: Path, name: str) -> Path:
    if not (folder / name).is_dir():
        found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())[:10]) or "none"
        raise UserError(
            f"{folder}: subset_name is {name!r}, expected one of its subfolders; found: {found}. Correct it, or "
            "leave it out to read the files of the folder itself"
        )
    return folder / name


_LONGEST_LINE = 1 << 24  # characters; a longer line is a damaged file, or no row that a model can read


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), ""), start=1):
            if len(line) > _LONGEST_LINE:
                raise UserError(f"{path}, line {number}: longer than {_LONGEST_LINE:,} characters; split or remove it")
            if line.strip():
                yield number, _object(path, number, _parse(path, line.rstrip(), first_line=number))


def _read_json(path: Path) -> Iterator[NumberedRow]:
    text = path.read_text(encoding="utf-8-sig")
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
    """Rows of text, numbers and booleans; empty cells are None.

    A column is converted only if all its cells are written as Python writes the number or boolean: a reference answer
    keeps its text (``2``, ``007``, ``1.10``, ``true``), which ``datasets.load_dataset`` changes.
    """
    import pandas as pd

    rows = list(_csv_rows(path))
    if not rows:
        return
    names = map(str, pd.read_csv(path, encoding="utf-8-sig", index_col=False, nrows=0))  # distinct and not empty
    columns = dict(zip(names, map(_converted, zip(*(row for _, row in rows), strict=True)), strict=True))
    for (number, _), *cells in zip(rows, *columns.values(), strict=True):
        yield number, dict(zip(columns, cells, strict=True))


def _converted(cells: Iterable[str]) -> list[Any]:
    """The cells of a CSV column: all numbers, all booleans, or text; None for the empty ones."""
    texts = [cell or None for cell in cells]
    for convert in (_number, {"True": True, "False": False}.get):
        values = [None if text is None else convert(text) for text in texts]
        if [value is None for value in values] == [text is None for text in texts]:
            return values
    return texts


def _number(text: str) -> int | float | None:
    """The number that Python writes as ``text``; None if there is none."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if abs(value) < 1 << 63 and str(value) == text:  # stored as 64 bits; neither infinite nor NaN
            return value
    return None


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of the last line of each row, and its cells; UserError for a row with too many or too few of them."""
    with path.open(encoding="utf-8-sig", newline="") as stream, _long_fields():
        reader, read = csv.reader(stream, strict=True), 0
        try:
            names = next((row for row in reader if len(row) > 1 or row[:1] == [""] or "".join(row).strip()), [])
            read = reader.line_num
            for row in filter(None, reader):
                if len(row) != len(names):
                    raise UserError(f"{path}, line {reader.line_num}: expected {len(names)} fields")
                read = reader.line_num
                yield read, row
        except csv.Error as error:
            raise UserError(f"{path}, after line {read}: not valid CSV: {error}") from None


@contextmanager
def _long_fields() -> Iterator[None]:
    """Accept cells of up to ``_LONGEST_LINE`` characters; the limit of ``csv`` holds for the whole process."""
    before = csv.field_size_limit(_LONGEST_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


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
