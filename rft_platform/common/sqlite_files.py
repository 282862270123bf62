"""Find damaged SQLite files below a project's folder, with a remedy and what the remedy loses.

SQLite's errors do not name the file. The functions here find the project's damaged file for an error.
"""

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rft_platform.common.errors import StorageError

#: Prefix of an SQLite database's URL.
SQLITE_URI = "sqlite:///"
_PATTERNS = ("dagster/**/*.db", "mlflow/*.db", "judging/*.sqlite")
_DAMAGED_IN_WORDS = re.compile(
    r"file is not a database|database disk image is malformed|malformed database schema|disk I/O error"
    r"|unsupported file format|\bno such table\b"
)
_BUSY_S = 30.0
_IO_ERROR = "disk I/O error"
_LEAST_FREE = 2**20  # bytes: SQLite needs space even to read a database, for an index of its write-ahead log
#: Types of network file systems, and of FUSE, by which most object stores are mounted.
_NETWORK = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "gpfs", "beegfs", "afs", "fuse.")
_MAGIC, _MOST_NAMED = b"SQLite format 3\x00", 3


@dataclass(frozen=True, slots=True)
class DamagedDatabase:
    """A database that cannot be read, and what to do about it."""

    path: Path
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} is damaged ({self.why}): {self.remedy}"


def database_file(uri: str) -> Path | None:
    """The file of the URL ``sqlite:///FILE``; None for servers and other databases."""
    return Path(uri.removeprefix(SQLITE_URI)) if uri.startswith(SQLITE_URI) else None


def backup_of(file: Path) -> Path:
    """The copy of MLflow's database ``file`` that each registration of a model version renews."""
    return file.with_name(f"{file.name}.backup")


def compact(uri: str) -> None:
    """Remove deleted bytes from the SQLite file at ``uri``; other databases do so themselves.

    Raises StorageError while another process writes to the file: deleted text is still there.
    """
    file = database_file(uri)
    if file is None:
        return
    try:
        with closing(sqlite3.connect(file, timeout=_BUSY_S, isolation_level=None)) as connection:
            connection.execute("VACUUM").close()
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        raise StorageError(f"{file} still holds deleted text ({error}): repeat this in a minute") from error
    if busy:
        raise StorageError(
            f"{file} still holds deleted text, because another process reads it: repeat this in a minute"
        )


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds ``path``; None for a local one.

    SQLite's write-ahead log needs memory that all processes share, so processes of two hosts would damage the file.
    """
    import psutil  # here, because agents in environments without it import this module

    place = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    found = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return found.fstype if found is not None and found.fstype.startswith(_NETWORK) else None


def databases(root: Path) -> list[Path]:
    """All SQLite files below a project's folder."""
    return sorted({path for pattern in _PATTERNS for path in root.glob(pattern) if path.is_file()})


def damaged_databases(root: Path, *, thorough: bool = False) -> Iterator[DamagedDatabase]:
    """The databases that cannot be read; ``thorough`` checks every page, else only header and schema are read."""
    for path in databases(root):
        why = damage_of_database(path, thorough=thorough)
        if why is not None:
            yield DamagedDatabase(path, why, remedy(path))


def damage_of_database(path: Path, *, thorough: bool = True) -> str | None:
    """Describe the damage of an SQLite file; None if it can be read. An empty file is an empty database."""
    try:
        with path.open("rb") as stream:
            header = stream.read(len(_MAGIC))
        if header and header != _MAGIC:
            return "file is not a database"
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if thorough else "ok"
    except sqlite3.Error as error:
        return None if "locked" in str(error) else str(error)
    except OSError as error:
        return str(error.strerror)
    return None if found == "ok" else " ".join(str(found).split())


def full_disk(root: Path) -> str | None:
    """A message if the disk of a project's folder is full; None if it has space.

    On a full disk SQLite cannot read intact databases, and reports an I/O error as for damage.
    """
    if not root.exists() or (free := shutil.disk_usage(root).free) >= _LEAST_FREE:
        return None
    return f"the disk of {root} is full ({free // 2**10} KiB free), so SQLite cannot read databases: free disk space"


def remedy(path: Path) -> str:
    """What to do about a damaged database, and what is lost."""
    move = f"move it away (with {path.name}-wal and {path.name}-shm) and start again"
    if path.name == "mlflow.db":
        return (
            f"move it away (with {path.name}-wal and {path.name}-shm) and copy {backup_of(path).name} "
            f"to {path.name}: it is as new as the newest registered version"
        )
    if path.parent.name == "judging":
        return f"{move}; answers of judge models are then requested again, and their cost is counted from zero"
    return f"{move}; only Dagster's run history is lost"


def is_damage(error: BaseException) -> bool:
    """Whether an exception is SQLite's error about a damaged file, raised directly or by another library."""
    database = isinstance(error, sqlite3.DatabaseError) or type(error).__module__.startswith(("sqlalchemy", "mlflow"))
    return database and _DAMAGED_IN_WORDS.search(str(error)) is not None


def named_damage(error: BaseException, root: Path | None = None) -> str:
    """One line for an error that ``is_damage`` accepts: the project's damaged files with remedies.

    ``root`` is the project's folder, by default ``RFT_HOME``.
    """
    root = root or Path(os.environ.get("RFT_HOME", ".rft"))
    if _IO_ERROR in str(error) and (full := full_disk(root)):
        return full
    found = list(damaged_databases(root)) or list(damaged_databases(root, thorough=True))
    if found:
        return "; ".join(map(str, found[:_MOST_NAMED]))
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"SQLite cannot read a database below {root.absolute()} ({first}): check that the disk works and has "
        "space; `rft doctor` checks every database"
    )
