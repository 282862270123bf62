"""The Parquet store of experiences: one folder a round, files written whole or not at all."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.errors import StorageError
from rft_platform.experience import schema
from rft_platform.experience.columns import list_lengths
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.rounds import round_key, round_number
from rft_platform.files import atomic_path, digest_file, digest_json, read_json, write_json

# Dictionaries pay where values repeat; token ids and log-probs are left to zstd alone.
_DICTIONARY = [
    "task_id",
    "taskset",
    "group_id",
    "run_id",
    "engine",
    "template_hash",
    "finish_reason",
    "messages",
    "tools",
]
# Statistics serve to skip files by number. On text with nulls they make DuckDB 2.0.0 answer IS NULL wrongly, where all
# values that are there are equal (as those of ``dropped_by`` tend to be).
_STATISTICS = frozenset({"round", "step", "policy_version", "created_at", "run_reward", "reward", "advantage"})
_BATCH = re.compile(r"batch-(\d{4,})\.parquet")
_NOTE = re.compile(r"[a-z][a-z0-9_-]*")


class ExperienceStore:
    """Rollouts, judgements and notes of every round below one folder.

    Layout::

        r0001/rollouts/batch-0000.parquet    one file an explore batch
        r0001/judged/<judge version>.parquet one file a judge version
        r0001/judged/current.json            names the judgement in force
        r0001/<name>.json                    notes: explore, train, evaluation, ...
    """

    def __init__(self, rounds: Path) -> None:
        self.root = Path(rounds)

    def rounds(self) -> list[int]:
        """Numbers of the rounds that have a folder, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(round_number(path.name) for path in self.root.glob("r[0-9][0-9][0-9][0-9]*") if path.is_dir())

    def round_folder(self, round: int) -> Path:
        """Folder of a round; it need not exist."""
        return self.root / round_key(round)

    # --- rollouts

    def write_rollouts(self, round: int, batch: int, rows: Sequence[RolloutRow]) -> Path:
        """Write the rows of one explore batch; the same batch again replaces its file.

        Raises ``ValueError`` naming the row when lengths differ, a row belongs to another round, or a ``row_id``
        occurs twice in the batch or already stands in another batch of the round.
        """
        path = self.round_folder(round) / "rollouts" / f"batch-{batch:04d}.parquet"
        table = schema.rows_to_table(rows)
        _check_lengths(table)
        _check_round(table, round)
        others = (
            _read(other, schema.ROLLOUT_SCHEMA, ["row_id"]) for other in self.rollout_files(round) if other != path
        )
        _check_unique(table, list(others))
        _write(path, table)
        return path

    def rollout_files(self, round: int) -> list[Path]:
        """Complete rollout files of a round, in batch order."""
        found = (self.round_folder(round) / "rollouts").glob("batch-*.parquet")
        return sorted((path for path in found if _BATCH.fullmatch(path.name)), key=_batch_number)

    def batches(self, round: int) -> list[int]:
        """Numbers of the explore batches that have landed, ascending."""
        return [_batch_number(path) for path in self.rollout_files(round)]

    def read_rollouts(self, round: int, columns: list[str] | None = None) -> pa.Table:
        """Rollouts of a round as one table (empty when there are none); ``columns`` limits what is read."""
        return _read_all(self.rollout_files(round), schema.ROLLOUT_SCHEMA, columns)

    def rollout_rows(self, round: int) -> list[RolloutRow]:
        """Rollouts of a round as records, in batch order."""
        return schema.table_to_rows(self.read_rollouts(round))

    def count_rollouts(self, round: int) -> int:
        """Number of rollout rows of a round, from the file footers alone."""
        return sum(_footer(path).num_rows for path in self.rollout_files(round))

    # --- judgements

    def write_judged(
        self, round: int, judge_version: str, rows: Sequence[JudgedRow], *, make_current: bool = True
    ) -> Path:
        """Write one judgement of a round, by default putting it in force; the same version again replaces its file.

        Raises ``ValueError`` naming the row when a ``row_id`` occurs twice or a row carries another judge version.
        """
        for row in rows:
            if row.judge_version != judge_version:
                raise ValueError(
                    f"judged row {row.row_id}: judge version {row.judge_version!r}, expected {judge_version!r}"
                )
        path = self._judged_path(round, judge_version)
        table = schema.judged_to_table(rows)
        _check_unique(table)
        _write(path, table)
        if make_current:
            self.put_in_force(round, judge_version)
        return path

    def put_in_force(self, round: int, judge_version: str) -> None:
        """Make a stored judgement the one that trains."""
        path = self._judged_path(round, judge_version)
        write_json(path.parent / "current.json", {"judge_version": judge_version, "rows": _footer(path).num_rows})

    def judge_version(self, round: int) -> str | None:
        """The judge version in force, or ``None`` before the first judgement."""
        path = self.round_folder(round) / "judged" / "current.json"
        return _read_note(path)["judge_version"] if path.exists() else None

    def judged_file(self, round: int, judge_version: str | None = None) -> Path | None:
        """File of a judgement (default: the one in force), or ``None`` when there is none."""
        version = judge_version or self.judge_version(round)
        if version is None:
            return None
        path = self._judged_path(round, version)
        if path.exists():
            return path
        if judge_version is None:
            raise StorageError(f"{path}: named by current.json but missing: judge round {round_key(round)} again")
        return None

    def judged_files(self, round: int) -> list[Path]:
        """Files of every judgement of a round, whatever its judge version."""
        return sorted((self.round_folder(round) / "judged").glob("*.parquet"))

    def read_judged(self, round: int, judge_version: str | None = None, columns: list[str] | None = None) -> pa.Table:
        """A judgement of a round as a table (empty when there is none); default: the one in force."""
        path = self.judged_file(round, judge_version)
        return _read_all([path] if path else [], schema.JUDGED_SCHEMA, columns)

    def judged_rows(self, round: int, judge_version: str | None = None) -> list[JudgedRow]:
        """A judgement of a round as records."""
        return schema.table_to_judged(self.read_judged(round, judge_version))

    def count_judged(self, round: int, judge_version: str | None = None) -> int:
        """Number of judged rows, from the file footer alone."""
        path = self.judged_file(round, judge_version)
        return _footer(path).num_rows if path else 0

    def _judged_path(self, round: int, judge_version: str) -> Path:
        return self.round_folder(round) / "judged" / f"{quote(judge_version, safe=' @+=,')}.parquet"

    def digest(self, round: int) -> str:
        """SHA-256 over the files of a round's rollouts and of its judgement in force: what a training read."""
        judged = self.judged_file(round)
        return digest_json([digest_file(path) for path in [*self.rollout_files(round), *([judged] if judged else [])]])

    # --- notes

    def write_note(self, round: int, name: str, value: Any) -> Path:
        """Write one small JSON document of a round, such as ``explore``, ``train`` or ``evaluation``."""
        path = self._note_path(round, name)
        write_json(path, value)
        return path

    def read_note(self, round: int, name: str) -> Any | None:
        """A note's value, or ``None`` when it was never written."""
        path = self._note_path(round, name)
        return _read_note(path) if path.exists() else None

    def _note_path(self, round: int, name: str) -> Path:
        if not _NOTE.fullmatch(name):
            raise ValueError(f"note name {name!r}: expected lower-case letters, digits, _ or -, as in 'explore'")
        return self.round_folder(round) / f"{name}.json"


def _check_lengths(table: pa.Table) -> None:
    expected = list_lengths(table["response_ids"])
    for name in ("logprobs", "loss_mask"):
        found = list_lengths(table[name])
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            index = int(wrong[0])
            row = table["row_id"][index].as_py()
            raise ValueError(
                f"rollout row {row}: {found[index]} {name} for {expected[index]} response_ids, expected as many"
            )


def _check_round(table: pa.Table, round: int) -> None:
    wrong = np.flatnonzero(table["round"].to_numpy() != round)
    if wrong.size:
        row, found = table["row_id"][int(wrong[0])].as_py(), table["round"][int(wrong[0])].as_py()
        raise ValueError(f"rollout row {row}: belongs to round {found}, written to round {round}")


def _check_unique(table: pa.Table, others: Sequence[pa.Table] = ()) -> None:
    """Refuse a ``row_id`` that occurs again, in ``table`` itself or in one of ``others``."""
    seen = {row for other in others for row in other["row_id"].to_pylist()}
    for row in table["row_id"].to_pylist():
        if row in seen:
            raise ValueError(f"row {row}: occurs twice; row ids are unique in a round (was a batch renumbered?)")
        seen.add(row)


def _write(path: Path, table: pa.Table) -> None:
    with atomic_path(path) as temp:
        pq.write_table(
            table,
            temp,
            compression="zstd",
            use_dictionary=[name for name in table.column_names if name in _DICTIONARY],
            write_statistics=[name for name in table.column_names if name in _STATISTICS],
        )


def _read_all(paths: Sequence[Path], expected: pa.Schema, columns: list[str] | None) -> pa.Table:
    tables = [_read(path, expected, columns) for path in paths]
    if tables:
        return pa.concat_tables(tables)
    return expected.empty_table() if columns is None else expected.empty_table().select(columns)


def _read(path: Path, expected: pa.Schema, columns: list[str] | None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            schema.check_version(file.schema_arrow, expected, str(path))
            return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _footer(path: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _read_note(path: Path) -> Any:
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{path}: cannot be read ({error}): delete the file and produce it again")


def _batch_number(path: Path) -> int:
    match = _BATCH.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
