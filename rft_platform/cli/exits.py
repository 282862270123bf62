"""Error messages and exit codes: one clear line for a known error, a traceback for an unexpected one.

Exit codes: 1 an error of the platform or of user code, 2 bad input or environment (nothing was started), 130
interrupted.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from rft_platform.common.errors import DiskFullError, RftError, StorageError, UserError
from rft_platform.common.fault_classification import as_fault
from rft_platform.common.redaction import visible

_LONGEST_LINE = 1000  # characters
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

_DISK = {
    errno.ENOSPC: "no space left on the disk: free disk space, or point RFT_HOME at another disk",
    errno.EDQUOT: "the disk quota is used up: free disk space, or point RFT_HOME at another disk",
    errno.EROFS: "the file system is read-only: point RFT_HOME at a writable folder",
    errno.EACCES: "permission denied: check the owner and mode, or point RFT_HOME at a folder that you own",
    errno.EPERM: "permission denied: check the owner and mode, or point RFT_HOME at a folder that you own",
}
_SQLITE = {"SQLITE_FULL": errno.ENOSPC, "SQLITE_READONLY": errno.EROFS, "SQLITE_CANTOPEN": errno.EACCES}


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into a message on stderr and an exit code; an unexpected exception keeps its traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except RftError as error:
        complain(str(error))
        raise typer.Exit(BAD_INPUT if isinstance(error, UserError | DiskFullError) else FAILED) from None
    except Exception as error:
        trouble = disk_trouble(error)
        if trouble is not None:
            complain(trouble)
            raise typer.Exit(BAD_INPUT) from None
        fault = as_fault(error)
        if not isinstance(fault, StorageError):
            raise
        complain(str(fault))
        raise typer.Exit(FAILED) from None


def complain(message: str) -> None:
    """Print ``error: ...`` to stderr, one line per problem; indented lines (the end of a log) are printed unchanged."""
    for line in error_lines(message):
        typer.echo(line, err=True)


def error_lines(message: str) -> list[str]:
    """The lines that ``complain`` prints; a very long line is cut in its middle."""
    lines = [visible(line) for line in message.splitlines() if line.strip()]
    return [_cut(line) if line.startswith(" ") else f"error: {_cut(line)}" for line in lines]


def _cut(line: str) -> str:
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def disk_trouble(error: BaseException) -> str | None:
    """The disk problem behind ``error`` or one of its causes; None if there is none."""
    cause: BaseException | None = error
    seen: set[int] = set()  # Dagster's errors can refer to each other as causes in a cycle
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return f"{cause.filename or 'a write failed'}: {_DISK[cause.errno]}"
        if isinstance(cause, sqlite3.OperationalError):
            name = str(getattr(cause, "sqlite_errorname", ""))
            for code, number in _SQLITE.items():
                if name.startswith(code):
                    return f"{cause}: {_DISK[number]}"
        cause = cause.__cause__ or cause.__context__
    return None
