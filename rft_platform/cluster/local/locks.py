"""Advisory locks between processes: ``flock`` on a lock file, which stays when the lock is released.

The kernel releases a lock when its holder ends in any way. The holder's process id in a lock file is for messages only.
A file system without locks is an error that names the file; there is no fallback to a lock that could be left behind.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rft_platform.common.errors import TransientError
from rft_platform.common.files import naming

LOCK_TIMEOUT_S = 120.0
#: Held while Alembic migrates a database: it keeps the migration under way in global variables, and a second one of
#: another thread would continue on the first one's database.
MIGRATING = threading.RLock()
_POLL_S = 0.01


@contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of ``path`` within the block. Its lock file is ``<path>.lock``.

    ``shared``: several processes may hold it so, while none holds it alone. Raises TransientError, naming the holder,
    if the lock is not free within ``timeout_s``: a stopped process keeps its locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path).open("a+", encoding="utf-8") as stream:
        _wait_for(stream, timeout_s, shared)
        with suppress(OSError):  # a full disk must not prevent the lock
            os.ftruncate(stream.fileno(), 0)
            os.pwrite(stream.fileno(), str(os.getpid()).encode(), 0)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of ``path``."""
    file = lock_file(path)
    if not file.exists():
        return False
    with file.open("r") as stream:
        return not try_lock(stream, shared=True)


def lock_file(path: Path) -> Path:
    """The file on which ``locked(path)`` holds its lock."""
    return path.with_name(path.name + ".lock")


def try_lock(stream: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds a lock that excludes this one."""
    with naming(Path(stream.name)):
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _wait_for(stream: IO[str], timeout_s: float, shared: bool) -> None:
    deadline = time.monotonic() + timeout_s
    while not try_lock(stream, shared=shared):
        if time.monotonic() > deadline:
            stream.seek(0)
            holder = stream.read(20).strip()
            raise TransientError(
                f"{stream.name} was held by process {holder or '(unknown)'} for {timeout_s:.0f} s: check "
                "whether that process is stopped or hangs, and end it"
            )
        time.sleep(_POLL_S)
