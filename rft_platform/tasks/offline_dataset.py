"""Load the dataset of an offline training: rows become conversations, pairs or labelled answers.

Each has its file and line.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_file, digest_json
from rft_platform.tasks.column_mapping import Columns, Row, conversation_of, labelled_of, pair_of
from rft_platform.tasks.sources import LocatedRow, located_rows, source_files, with_nested

#: Makes the row to train on from a row of the dataset and its location; None: prompt or answer is empty.
_Maker = Callable[[dict[str, Any], str], Row | None]

LISTED = 10  # rows listed in a report


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Counts of read and dropped rows. Rows are named FILE:LINE, the first few of each kind."""

    source: str
    columns: tuple[str, ...]
    rows: int
    duplicates: int  # rows equal to an earlier one in the content that is trained on
    duplicate_rows: tuple[str, ...]
    empty: int  # rows without a prompt or an answer
    empty_rows: tuple[str, ...]
    equal: int  # pairs with equal answers, which express no preference
    equal_rows: tuple[str, ...]

    def left_out(self) -> str:
        """A message about the dropped rows; empty if none were dropped."""
        counts = ", ".join(f"{count:,} {name}" for name, count, _ in self._kinds() if count)
        return f"left out {counts} of {self.rows:,} rows" if counts else ""

    def examples(self) -> str:
        """A message about the dropped rows, with the first locations of each kind."""
        return "; ".join(f"{count:,} {name} (first: {', '.join(at[:3])})" for name, count, at in self._kinds() if count)

    def _kinds(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        return (
            ("duplicate", self.duplicates, self.duplicate_rows),
            ("empty", self.empty, self.empty_rows),
            ("undecided (chosen equals rejected)", self.equal, self.equal_rows),
        )


@dataclass(frozen=True, slots=True)
class OfflineDataset:
    """The rows in file order, their locations, and the digest of their content and order."""

    rows: tuple[Row, ...]  # messages; prompt, chosen and rejected; or prompt, completion and label; optionally tools
    places: tuple[tuple[str, int], ...]  # file and line (or row number) of each row
    digest: str
    report: OfflineReport
    files: dict[str, str]  # SHA-256 of each source file; empty for a dataset of the hub


def load_conversations(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Load demonstrations: rows with ``messages``, or with a prompt and a response, in the named columns.

    Raises UserError naming the columns found and expected, or the malformed row.
    """

    def choose(found: tuple[str, ...]) -> _Maker:
        columns.check_demonstrations(path, found)
        return partial(conversation_of, columns)

    return _load(path, split, subset_name, limit, columns, choose)


def load_pairs(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Load preference pairs: rows with a prompt and its chosen and rejected answers, in the named columns.

    Without a prompt column, chosen and rejected are whole conversations with the same beginning. Rows with a label
    instead have a prompt and one answer, which is desirable or not. Raises UserError as ``load_conversations`` does.
    """

    def choose(found: tuple[str, ...]) -> _Maker:
        labelled = columns.has_labels(found)
        (columns.check_labels if labelled else columns.check_pairs)(path, found)
        return partial(labelled_of if labelled else pair_of, columns)

    return _load(path, split, subset_name, limit, columns, choose)


def _load(
    path: str,
    split: str,
    subset_name: str | None,
    limit: int | None,
    columns: Columns,
    choose: Callable[[tuple[str, ...]], _Maker],
) -> OfflineDataset:
    located = [
        (file, number, with_nested(row, columns.names()))
        for file, number, row in located_rows(path, split, subset_name)
    ]
    if not located:
        raise UserError(f"{path}: the dataset is empty; expected at least one row")
    found = tuple(dict.fromkeys(name for _, _, row in located for name in row))
    make, sorting = choose(found), _Sorting()
    kept = list(islice(sorting.kept(located, make), limit))
    if not kept:
        raise UserError(
            f"{path}: none of its {len(located):,} rows can be trained on: {sorting.report(path, found).examples()}"
        )
    digest = hashlib.sha256()
    for _, row in kept:
        digest.update(digest_json(row).encode())
    return OfflineDataset(
        rows=tuple(row for _, row in kept),
        places=tuple(place for place, _ in kept),
        digest=digest.hexdigest(),
        report=sorting.report(path, found),
        files=_digests(source_files(path, split, subset_name)),
    )


class _Sorting:
    """Separates rows to train on from duplicate, empty and undecided rows, and counts the rows that are left out."""

    def __init__(self) -> None:
        self._rows = 0
        self._duplicates: list[str] = []
        self._empty: list[str] = []
        self._equal: list[str] = []

    def kept(self, located: Iterable[LocatedRow], make: _Maker) -> Iterator[tuple[tuple[str, int], Row]]:
        """The rows to train on, each with its location."""
        seen: set[bytes] = set()
        for file, number, raw in located:
            self._rows += 1
            where = f"{file}:{number}"
            row = make(raw, where)
            if row is None:
                self._empty.append(where)
            elif "chosen" in row and row["chosen"] == row["rejected"]:
                self._equal.append(where)
            elif (identity := _identity(row)) in seen:
                self._duplicates.append(where)
            else:
                seen.add(identity)
                yield (file, number), row

    def report(self, path: str, columns: tuple[str, ...]) -> OfflineReport:
        """The counts so far."""
        named = [(len(rows), tuple(rows[:LISTED])) for rows in (self._duplicates, self._empty, self._equal)]
        (duplicates, duplicate_rows), (empty, empty_rows), (equal, equal_rows) = named
        return OfflineReport(
            path, columns, self._rows, duplicates, duplicate_rows, empty, empty_rows, equal, equal_rows
        )


def _identity(row: Row) -> bytes:
    return hashlib.sha256(json.dumps(row, sort_keys=True, ensure_ascii=False).encode()).digest()


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_file(file) for file in files}
