"""From any exception to the taxonomy: what the platform did not raise itself gets its place here."""

import errno
import re
import sqlite3
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import rft_platform
from rft_platform.errors import (
    DiskFullError,
    FileSystemDownError,
    FileSystemError,
    OutOfMemoryError,
    RftError,
    StorageError,
    TransientError,
    UserCodeError,
)
from rft_platform.redaction import redact
from rft_platform.sqlite_files import is_damage, named_damage

CAUSE_CHARACTERS = 300  # of the one line that runs, plans and skip reasons carry
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
#: Troubles of file systems other than a full one, and what to do.
FILE_SYSTEM: dict[int | None, str] = {
    errno.EIO: "the disk or its network fails: see the kernel's log, then start again",
    errno.ESTALE: "the network file system lost the file: see that it is mounted, then start again",
    errno.EXDEV: "keep RFT_HOME and everything below it on one file system, without mounts inside",
    errno.ENOLCK: "the file system has no locks: put RFT_HOME on a local disk, or mount NFS with locks",
    errno.EROFS: "the file system is read-only: mount it writable, or point RFT_HOME at another disk",
}
_MAY_PASS = (errno.EIO, errno.ESTALE)
# Libraries that write for us (safetensors, SQLite) tell of a full disk in words only.
_FULL_IN_WORDS = re.compile(r"No space left on device|os error 28\b|database or disk is full|Disk quota exceeded")
_MEMORY_IN_WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_LOCKED_IN_WORDS = re.compile(r"database( table)? is locked")
_OURS = Path(rft_platform.__file__).parent
_LIBRARIES = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})


def as_fault(error: BaseException) -> RftError:
    """``error`` if it is the platform's own, else the error of the taxonomy that it amounts to, chained to it."""
    if isinstance(error, RftError):
        return error
    found = _classified(error)
    found.__cause__ = error
    return found


def described(error: BaseException) -> str:
    """``error`` with its type, for a message, a note or a report; secrets in its text are masked."""
    return redact(f"{type(error).__name__}: {error}")


def cause_line(error: RftError) -> str:
    """The error in one line, clipped; with the place in the user's code where that is at fault."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    place = user_place(error) if error.fault == "user_code" else None
    if place is not None and place not in line:
        line = f"{line} ({place})"
    return line if len(line) <= CAUSE_CHARACTERS else line[: CAUSE_CHARACTERS - 1] + "…"


def user_place(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of user code that ``error``, or what caused it, came through."""
    for link in _causes(error):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if _is_user_code(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
    return None


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is a disk without room."""
    return any(_says_full(link) for link in _causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is memory that could not be had, on the host or on an accelerator."""
    return any(isinstance(link, MemoryError) or _MEMORY_IN_WORDS.search(str(link)) for link in _causes(error))


def _classified(error: BaseException) -> RftError:
    name = described(error).strip()
    if is_disk_full(error):
        path = next((link.filename for link in _causes(error) if isinstance(link, OSError) and link.filename), None)
        return DiskFullError(f"{path or 'a write failed'}: no space left on the disk ({error}); make room")
    if is_out_of_memory(error):
        return OutOfMemoryError(f"out of memory in the process of the run ({name}); what was stored before stands")
    place = user_place(error)
    if place is not None:
        return UserCodeError(f"{name} ({place})")
    if (found := _storage_fault(error)) is not None:
        return found
    if any(_is_transient(link) for link in _causes(error)):
        return TransientError(name)
    return RftError(f"{name} ({_innermost_place(error)}): the platform did not expect this")


def _storage_fault(error: BaseException) -> StorageError | None:
    """The error of a file system or of a damaged database that ``error`` is, or was caused by."""
    for link in _causes(error):
        if isinstance(link, OSError) and link.errno in FILE_SYSTEM:
            kind = FileSystemDownError if link.errno in _MAY_PASS else FileSystemError
            file = link.filename2 or link.filename or "a file"
            return kind(f"{file}: {link.strerror}: {FILE_SYSTEM[link.errno]}")
        if is_damage(link):
            return StorageError(named_damage(link))
    return None


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return _LOCKED_IN_WORDS.search(str(error)) is not None
    return isinstance(error, ConnectionError | TimeoutError)


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return True
    return _FULL_IN_WORDS.search(str(error)) is not None


def _is_user_code(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(root) for root in (_OURS, *_LIBRARIES))


def _innermost_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_OURS)]
    if not frames:
        return "no traceback"
    last = (ours or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what led to it; errors that name each other in a circle end it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
