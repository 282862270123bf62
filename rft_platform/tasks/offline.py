"""Datasets of offline trainings: rows become conversations, or pairs of answers; each knows where it was read."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rft_platform.errors import UserError
from rft_platform.files import digest_file, digest_json
from rft_platform.tasks.columns import Columns, Row, conversation_of, pair_of
from rft_platform.tasks.sources import LocatedRow, located_rows, source_files

LISTED = 10  # rows that a report names


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """What was read and what was left out; rows are named FILE:LINE, the first few of each kind."""

    source: str
    columns: tuple[str, ...]
    rows: int
    duplicates: int  # rows equal to an earlier one in what is trained on
    duplicate_rows: tuple[str, ...]
    empty: int  # rows without a prompt or an answer
    empty_rows: tuple[str, ...]
    equal: int  # pairs whose answers are equal: nothing is preferred in them
    equal_rows: tuple[str, ...]

    def left_out(self) -> str:
        """In words what was left out; empty where nothing was."""
        said = ", ".join(f"{count:,} {name}" for name, count, _ in self._kinds() if count)
        return f"left out {said} of {self.rows:,} rows" if said else ""

    def examples(self) -> str:
        """In words what was left out, with the first places of each kind."""
        return "; ".join(f"{count:,} {name} (first: {', '.join(at[:3])})" for name, count, at in self._kinds() if count)

    def _kinds(self) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
        return (
            ("duplicate", self.duplicates, self.duplicate_rows),
            ("empty", self.empty, self.empty_rows),
            ("undecided (chosen equals rejected)", self.equal, self.equal_rows),
        )


@dataclass(frozen=True, slots=True)
class OfflineDataset:
    """The rows in file order, where each stands, and the digest of all that is trained on (order included)."""

    rows: tuple[Row, ...]  # messages, or prompt, chosen and rejected (lists of messages); perhaps tools
    places: tuple[tuple[str, int], ...]  # file and line (or row number) of each
    digest: str
    report: OfflineReport
    files: dict[str, str]  # SHA-256 of each source file; empty for a dataset of the hub


def load_conversations(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Demonstrations: rows with ``messages``, or with a prompt and a response, in the columns that are named.

    Raises UserError naming the columns that were found and those that are expected, or the row that is malformed.
    """
    return _load(path, split, subset_name, limit, columns.check_demonstrations, partial(conversation_of, columns))


def load_pairs(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Preference pairs: rows with a prompt and its chosen and rejected answers, in the columns that are named.

    Without a prompt column, chosen and rejected are whole conversations that begin alike. Raises as
    ``load_conversations`` does.
    """
    return _load(path, split, subset_name, limit, columns.check_pairs, partial(pair_of, columns))


def _load(
    path: str,
    split: str,
    subset_name: str | None,
    limit: int | None,
    check: Callable[[str, tuple[str, ...]], None],
    make: Callable[[dict[str, Any], str], Row | None],
) -> OfflineDataset:
    located = list(located_rows(path, split, subset_name))
    if not located:
        raise UserError(f"{path}: the dataset is empty; expected at least one row")
    found = tuple(dict.fromkeys(name for _, _, row in located for name in row))
    check(path, found)
    sorting = _Sorting()
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
    """Tells rows to train on from duplicate, empty and undecided ones, which it counts."""

    def __init__(self) -> None:
        self._rows = 0
        self._duplicates: list[str] = []
        self._empty: list[str] = []
        self._equal: list[str] = []

    def kept(
        self, located: Iterable[LocatedRow], make: Callable[[dict[str, Any], str], Row | None]
    ) -> Iterator[tuple[tuple[str, int], Row]]:
        """The rows to train on, each with its place."""
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
        """What was counted so far."""
        named = [(len(rows), tuple(rows[:LISTED])) for rows in (self._duplicates, self._empty, self._equal)]
        (duplicates, duplicate_rows), (empty, empty_rows), (equal, equal_rows) = named
        return OfflineReport(
            path, columns, self._rows, duplicates, duplicate_rows, empty, empty_rows, equal, equal_rows
        )


def _identity(row: Row) -> bytes:
    return hashlib.sha256(json.dumps(row, sort_keys=True, ensure_ascii=False).encode()).digest()


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_file(file) for file in files}
