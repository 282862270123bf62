"""Map any exception to an error of the platform's taxonomy (``errors.py``)."""

import errno
import os
import re
import sqlite3
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import rft_platform
from rft_platform.common.errors import (
    DiskFullError,
    FileSystemDownError,
    FileSystemError,
    OutOfMemoryError,
    RftError,
    StorageError,
    TransientError,
    UserCodeError,
)
from rft_platform.common.redaction import redact, visible
from rft_platform.common.sqlite_files import is_damage, named_damage

CAUSE_CHARACTERS = 300  # maximum length of the cause line of runs, plans and skip reasons
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
#: Errors of file systems other than a full disk, and what to do about each.
FILE_SYSTEM: dict[int | None, str] = {
    errno.EIO: "the disk or its network fails: read the kernel's log, fix the cause, then start again",
    errno.ESTALE: "the network file system lost the file: check that it is mounted, then start again",
    errno.EXDEV: "put RFT_HOME and everything below it on one file system, without mounts inside",
    errno.ENOLCK: "the file system has no locks: put RFT_HOME on a local disk, or mount NFS with locks",
    errno.EROFS: "the file system is read-only: mount it writable, or point RFT_HOME at another disk",
}
_MAY_PASS = (errno.EIO, errno.ESTALE)
# Libraries that write files for the platform (safetensors, SQLite) report a full disk in the message only.
_FULL_IN_WORDS = re.compile(r"No space left on device|os error 28\b|database or disk is full|Disk quota exceeded")
_MEMORY_IN_WORDS = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_LOCKED_IN_WORDS = re.compile(r"database( table)? is locked")
_OURS = Path(rft_platform.__file__).parent
_FOREIGN = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(_OURS))
)
#: Errors of Postgres's clients about the connection or the server, and not about a statement.
_POSTGRES = {(module, name) for module in ("psycopg2", "psycopg") for name in ("OperationalError", "InterfaceError")}


def as_fault(error: BaseException) -> RftError:
    """``error`` if it is an RftError, else the matching error of the taxonomy, with ``error`` as its cause."""
    if isinstance(error, RftError):
        return error
    found = _classified(error)
    found.__cause__ = error
    return found


def described(error: BaseException) -> str:
    """Type and text of ``error`` for a message, a note or a report, with secrets masked. A group's errors follow it."""
    inner = "; ".join(map(described, error.exceptions)) if isinstance(error, BaseExceptionGroup) else ""
    return visible(redact(f"{type(error).__name__}: {error}{f': {inner}' if inner else ''}"))


def cause_line(error: RftError) -> str:
    """The error in one line, clipped; for an error of user code, with the place in that code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    place = user_place(error) if error.fault == "user_code" else None
    if place is not None and place not in line:
        line = f"{line} ({place})"
    return line if len(line) <= CAUSE_CHARACTERS else line[: CAUSE_CHARACTERS - 1] + "…"


def user_place(error: BaseException) -> str | None:
    """``file:line`` of the innermost user-code frame in the tracebacks of ``error`` and its causes, or None."""
    places = (innermost_user_place(traceback.extract_tb(link.__traceback__)) for link in _causes(error))
    return next((place for place in places if place is not None), None)


def innermost_user_place(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """``file:line`` of the last of ``frames`` that is user code, or None."""
    users = (frame for frame in reversed(frames) if is_user_code(frame.filename))
    return next((f"{frame.filename}:{frame.lineno}" for frame in users), None)


def user_traceback(error: BaseException) -> str | None:
    """The traceback of ``error`` from the first user-code frame on, without the platform's frames above; or None."""
    for link in _causes(error):
        frames = traceback.extract_tb(link.__traceback__)
        for number, frame in enumerate(frames):
            if is_user_code(frame.filename):
                lines = "".join(traceback.format_list(frames[number:]))
                return f"Traceback (most recent call last):\n{lines}{described(error)}"
    return None


def is_user_code(file: str) -> bool:
    """Whether a source file is not of the standard library, an installed package or the platform."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)  # also those of another environment
    return not (file.startswith("<") or installed or os.path.realpath(file).startswith(_FOREIGN))


def is_disk_full(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is a full disk."""
    return any(_says_full(link) for link in _causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is a lack of memory on the host or an accelerator."""
    return any(isinstance(link, MemoryError) or _MEMORY_IN_WORDS.search(str(link)) for link in _causes(error))


def _classified(error: BaseException) -> RftError:
    name = described(error).strip()
    if is_disk_full(error):
        path = next((link.filename for link in _causes(error) if isinstance(link, OSError) and link.filename), None)
        return DiskFullError(f"{path or 'a write failed'}: no space left on the disk ({error}); free disk space")
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"out of memory in the process of the run ({name}); results that were stored before are kept"
        )
    place = user_place(error)
    if place is not None:
        return UserCodeError(f"{name} ({place})")
    if (found := _storage_fault(error)) is not None:
        return found
    if any(_is_transient(link) for link in _causes(error)):
        return TransientError(name)
    return RftError(f"{name} ({_innermost_place(error)}): unexpected error in the platform")


def _storage_fault(error: BaseException) -> StorageError | None:
    """The file system error or damaged database behind ``error`` or one of its causes; None if there is none."""
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
    if any((base.__module__, base.__name__) in _POSTGRES for base in type(error).__mro__):
        return True
    return isinstance(error, ConnectionError | TimeoutError)


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return True
    return _FULL_IN_WORDS.search(str(error)) is not None


def _innermost_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_OURS)]
    if not frames:
        return "no traceback"
    last = (ours or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and its chain of causes and contexts; stops at a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
