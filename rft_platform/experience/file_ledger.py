"""The ledger of a round (``files.json``): every stored Parquet file, with digest, rows and size.

Invariants:

- A file is stored if and only if it is in the ledger; readers ignore other files.
- Only the holder of the round's lock changes files or ledger.
- A file is renamed into place, then ``files.json`` is replaced atomically. A crash between the two steps leaves a file
  that nobody reads and that the repeated launch replaces.
- The ledger never gives a file the digest of other bytes: the entry of a replaced file is removed before the rename.
- The digests of the originally written files survive every rewrite, because a lineage identifies its rows by them.
- A round that lost its ledger gets a ledger of all files in its folder when it is next read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import StorageError
from rft_platform.common.files import atomic_path, digest_file, read_sealed_json, write_sealed_json
from rft_platform.common.recorded_paths import from_record
from rft_platform.experience.file_names import batches_in, without_doubles
from rft_platform.object_store.mirror import fetch_missing

LEDGER = "files.json"
#: The subfolders of a round with Parquet files.
ROLLOUTS, JUDGED, UNFINISHED = "rollouts", "judged", "unfinished"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file from which another file was made and which may no longer exist."""

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A stored file."""

    sha256: str
    rows: int
    bytes: int
    written_at: float  # seconds since the epoch
    kept: int | None = None  # number of rows that no filter dropped, for a judgement
    made_of: tuple[SourceFile, ...] = ()  # the original files in row order, if this file is a rewrite of them
    masked: int | None = None  # rows that a filter dropped but whose reward counts; None: no judgement, or not counted

    @classmethod
    def of(cls, path: Path, made_of: tuple[SourceFile, ...] = ()) -> "FileEntry":
        """The entry for a file's current content. A file that cannot be read gets 0 rows."""
        stat, kept, masked = path.stat(), None, None
        try:
            with pq.ParquetFile(path) as file:
                rows = file.metadata.num_rows
                if "dropped_by" in file.schema_arrow.names:
                    kept = file.read(columns=["dropped_by"])["dropped_by"].null_count
                if "masked" in file.schema_arrow.names:
                    masked = pc.sum(file.read(columns=["masked"])["masked"], min_count=0).as_py()
        except (pa.ArrowException, OSError):
            rows = 0
        return cls(digest_file(path), rows, stat.st_size, stat.st_mtime, kept, made_of, masked)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileEntry":
        """Parse the result of ``asdict``."""
        return cls(**{**value, "made_of": tuple(SourceFile(**source) for source in value.get("made_of", ()))})

    def sources(self, name: str) -> tuple[SourceFile, ...]:
        """The files that were merged or rewritten into the file ``name``; without any, the file itself."""
        return self.made_of or (SourceFile(name, self.sha256, self.rows),)

    @property
    def digests(self) -> list[str]:
        """Digests of the originally written files; they stay the same when a file is rewritten."""
        return [source.sha256 for source in self.made_of] or [self.sha256]


@dataclass(frozen=True, slots=True)
class RetiredFile:
    """A file whose rows were removed on purpose; its entry is kept."""

    entry: FileEntry
    retired_at: float  # seconds since the epoch
    archived_to: str | None  # its new path, as ``to_record`` stores it; None: deleted


@dataclass(slots=True)
class Contents:
    """Content of a ledger. Names are relative to the round's folder, for example ``rollouts/batch-0000.parquet``."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    retired: dict[str, RetiredFile] = field(default_factory=dict)
    superseded: dict[str, float] = field(default_factory=dict)  # replaced file, kept for late readers -> time

    def rollouts(self, *, retired: bool = False) -> list[str]:
        """Names of the rollout files in batch order; with ``retired`` also those of retired files."""
        names = [*self.files, *(self.retired if retired else ())]
        found = [name for name in names if name.startswith(f"{ROLLOUTS}/")]
        return sorted(found, key=lambda name: batches_in(PurePosixPath(name).name)[0])

    def judgements(self) -> list[str]:
        """Names of the judgement files, in alphabetical order."""
        return sorted(name for name in self.files if name.startswith(f"{JUDGED}/"))

    def unfinished(self) -> list[str]:
        """Names of the files of answers that a later batch continues."""
        return sorted(name for name in self.files if name.startswith(f"{UNFINISHED}/"))

    def retirement(self, home: Path) -> str:
        """A message about the retired files of a project in ``home``; empty if there are none."""
        if not self.retired:
            return ""
        files = list(self.retired.values())
        day = time.strftime("%Y-%m-%d", time.gmtime(max(file.retired_at for file in files)))
        archived_to = files[0].archived_to
        where = f"they are in {from_record(archived_to, home).parent}" if archived_to else "they were deleted"
        return f"{sum(file.entry.rows for file in files):,} rollout rows were retired on {day}: {where}"

    def to_json(self) -> dict[str, Any]:
        """The document that ``from_json`` reads."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Contents":
        """Parse a ledger document; raises KeyError, TypeError or ValueError if it is malformed."""
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}, expected {_FORMAT}")
        return cls(
            {name: FileEntry.from_json(value) for name, value in document["files"].items()},
            {
                name: RetiredFile(FileEntry.from_json(value["entry"]), value["retired_at"], value["archived_to"])
                for name, value in document["retired"].items()
            },
            dict(document["superseded"]),
        )


class Ledger:
    """The file ``files.json`` of one round folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER
        self._saved: dict[str, Any] = {}

    def read(self) -> Contents:
        """The stored files. Raises StorageError if the ledger is unreadable."""
        try:
            return self._load()
        except FileNotFoundError:
            if not self._parquet_files():
                return Contents()
        with self.change() as contents:
            return contents

    @contextmanager
    def change(self) -> Iterator[Contents]:
        """Hold the round's lock and yield the contents; changes are saved if the block ends without an exception."""
        with locked(self.path):
            try:
                contents = self._load()
            except FileNotFoundError:
                contents = self._adopted()
                self.save(contents)
            self._saved = contents.to_json()
            yield contents
            if contents.to_json() != self._saved:
                self.save(contents)

    def save(self, contents: Contents) -> None:
        """Write the ledger. The caller holds the lock."""
        write_sealed_json(self.path, contents.to_json())
        self._saved = contents.to_json()

    def land(self, contents: Contents, name: str, write: Callable[[Path], None]) -> Path:
        """Create the file ``name`` by calling ``write`` and add it to the ledger. The caller holds the lock.

        A file that is replaced stays until the new one is complete. Its entry is removed just before the rename, so
        that a crash never leaves new bytes with the digest of the replaced ones.
        """
        path, replaced = self.folder / name, contents.files.get(name)
        try:
            with atomic_path(path) as temp:
                write(temp)
                entry = FileEntry.of(temp)
                if replaced is not None:
                    del contents.files[name]
                    self.save(contents)
        except BaseException:
            if replaced is not None and name not in contents.files:
                contents.files[name] = replaced
                self.save(contents)
            raise
        contents.files[name] = entry
        contents.superseded.pop(name, None)  # the file at this path is current again and must not be deleted
        self.save(contents)
        return path

    def _load(self) -> Contents:
        try:
            if not self.path.exists():
                fetch_missing(self.path)  # a lost ledger is not one that was never written
            return Contents.from_json(read_sealed_json(self.path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"{self.path}: is not a ledger of this version ({error!r}): `rft store check` says what can be done"
            ) from error

    def _adopted(self) -> Contents:
        """The contents of a new ledger for a round without one: all files in its folder."""
        return Contents({str(path.relative_to(self.folder)): FileEntry.of(path) for path in self._parquet_files()})

    def _parquet_files(self) -> list[Path]:
        rollouts = {path.name: path for path in self.folder.glob("rollouts/batch-*.parquet")}
        judged = (path for path in self.folder.glob("judged/*.parquet") if not path.name.startswith("."))
        unfinished = sorted(self.folder.glob(f"{UNFINISHED}/batch-*.parquet"))
        return [*(rollouts[name] for name in without_doubles(rollouts)), *sorted(judged), *unfinished]
