"""The ledger of a round: which Parquet files have landed, with digest, rows and size. What is not in it is not there.

``files.json`` is replaced atomically after each file is renamed into place, both under the round's lock. So a crash
between the two leaves a file that nobody reads and that the repeated phase replaces. A round that was written before
there were ledgers gets one when it is first read: whatever lies there is taken as it is.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.errors import StorageError
from rft_platform.experience.batches import batches_in, without_doubles
from rft_platform.experience.schema import version_of
from rft_platform.files import atomic_path, digest_file, read_sealed_json, write_sealed_json
from rft_platform.processes.lease import locked

LEDGER = "files.json"
ROLLOUTS, JUDGED = "rollouts", "judged"  # the folders of a round that hold Parquet files
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that another one was made of and that need not be there any more."""

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file that has landed."""

    sha256: str
    rows: int
    bytes: int
    schema_version: int
    written_at: float  # seconds since the epoch
    kept: int | None = None  # of a judgement: rows that no filter dropped
    made_of: tuple[SourceFile, ...] = ()  # in row order, where the file is a rewrite of others that were written first

    @classmethod
    def of(cls, path: Path, made_of: tuple[SourceFile, ...] = ()) -> "FileEntry":
        """What a file holds now; a file that cannot be read counts no rows."""
        stat, kept = path.stat(), None
        try:
            with pq.ParquetFile(path) as file:
                rows, version = file.metadata.num_rows, version_of(file.schema_arrow)
                if "dropped_by" in file.schema_arrow.names:
                    kept = file.read(columns=["dropped_by"])["dropped_by"].null_count
        except (pa.ArrowException, OSError):
            rows, version = 0, 0
        return cls(digest_file(path), rows, stat.st_size, version, stat.st_mtime, kept, made_of)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileEntry":
        """Read back what ``asdict`` gave."""
        return cls(**{**value, "made_of": tuple(SourceFile(**source) for source in value.get("made_of", ()))})

    def sources(self, name: str) -> tuple[SourceFile, ...]:
        """The files as they were first written that a file of this ``name`` stands for."""
        return self.made_of or (SourceFile(name, self.sha256, self.rows),)

    @property
    def digests(self) -> list[str]:
        """Digests of the files as they were first written: rewriting a file changes its bytes, not its identity."""
        return [source.sha256 for source in self.made_of] or [self.sha256]


@dataclass(frozen=True, slots=True)
class RetiredFile:
    """A file whose rows were removed on purpose; what it was stays known."""

    entry: FileEntry
    retired_at: float  # seconds since the epoch
    archived_to: str | None  # where it lies now; None: deleted


@dataclass(slots=True)
class Contents:
    """What a ledger says. Names are relative to the round's folder, as in ``rollouts/batch-0000.parquet``."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    retired: dict[str, RetiredFile] = field(default_factory=dict)
    superseded: dict[str, float] = field(default_factory=dict)  # replaced files that late readers may hold: since when

    def rollouts(self, *, retired: bool = False) -> list[str]:
        """Names of the rollout files in batch order; with ``retired`` also of those whose rows were removed."""
        names = [*self.files, *(self.retired if retired else ())]
        found = [name for name in names if name.startswith(f"{ROLLOUTS}/")]
        return sorted(found, key=lambda name: batches_in(PurePosixPath(name).name)[0])

    def judgements(self) -> list[str]:
        """Names of the judgements' files, in alphabetical order."""
        return sorted(name for name in self.files if name.startswith(f"{JUDGED}/"))

    def retirement(self) -> str:
        """In words what became of the retired files; empty where there are none."""
        if not self.retired:
            return ""
        files = list(self.retired.values())
        day = time.strftime("%Y-%m-%d", time.gmtime(max(file.retired_at for file in files)))
        where = f"they lie in {Path(files[0].archived_to).parent}" if files[0].archived_to else "they were deleted"
        return f"{sum(file.entry.rows for file in files):,} rollout rows were retired on {day}: {where}"

    def to_json(self) -> dict[str, Any]:
        """The document that ``from_json`` reads."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Contents":
        """Read a ledger document; raises KeyError, TypeError or ValueError where it is none."""
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
    """``files.json`` of one round folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER
        self._saved: dict[str, Any] = {}

    def read(self) -> Contents:
        """What has landed. Raises StorageError where the ledger is unreadable."""
        try:
            return self._load()
        except FileNotFoundError:
            if not self._parquet_files():
                return Contents()
        with self.change() as contents:
            return contents

    @contextmanager
    def change(self) -> Iterator[Contents]:
        """Hold the round's lock; what the caller makes of the contents is saved when the body ends well."""
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
        """Write the ledger; the caller holds the lock."""
        write_sealed_json(self.path, contents.to_json())
        self._saved = contents.to_json()

    def land(self, contents: Contents, name: str, write: Callable[[Path], None]) -> Path:
        """Have ``write`` make the file ``name``, and enter it. The caller holds the lock.

        A file that is replaced stays until the new one is complete. Its entry goes just before the rename, so that a
        crash never leaves new bytes under an old digest.
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
        contents.superseded.pop(name, None)  # one of this name had been replaced: what lies there now is to stay
        self.save(contents)
        return path

    def _load(self) -> Contents:
        try:
            return Contents.from_json(read_sealed_json(self.path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"{self.path}: is no ledger of this version ({error!r}): `rft store check` says what can be done"
            ) from error

    def _adopted(self) -> Contents:
        """The files of a round that has no ledger yet."""
        return Contents({str(path.relative_to(self.folder)): FileEntry.of(path) for path in self._parquet_files()})

    def _parquet_files(self) -> list[Path]:
        rollouts = {path.name: path for path in self.folder.glob("rollouts/batch-*.parquet")}
        judged = (path for path in self.folder.glob("judged/*.parquet") if not path.name.startswith("."))
        return [*(rollouts[name] for name in without_doubles(rollouts)), *sorted(judged)]
