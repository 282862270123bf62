"""Which processes use a long-lived process, so that a command does not end a process that another command uses.

A user of the process of ``<lease>.json`` holds a shared lock on ``<lease>.json.users`` until it releases the lock or
ends in any way. The callers of ``note_use`` and ``release`` hold the lease's start lock, so no process begins to use a
process that is being ended.
"""

import atexit
from pathlib import Path
from typing import IO

from rft_platform.common.errors import TransientError
from rft_platform.common.locks import try_lock

_used: dict[Path, IO[str]] = {}  # the locks of this process, by lease


def note_use(lease: Path) -> None:
    """Record that this process uses the process of ``lease`` (running or about to start) until ``release``."""
    lease = lease.absolute()
    if lease in _used:
        return
    lease.parent.mkdir(parents=True, exist_ok=True)
    stream = _open(lease)
    if not try_lock(stream, shared=True):
        stream.close()
        raise TransientError(f"{stream.name} is locked: the process of {lease} is being ended; repeat the command")
    _used[lease] = stream


def used_leases() -> set[Path]:
    """The leases whose processes this process uses."""
    return set(_used)


def release(lease: Path) -> bool:
    """End this process's use; returns whether no other process uses the process of ``lease``."""
    lease = lease.absolute()
    own = _used.pop(lease, None)
    if own is not None:
        own.close()
    with _open(lease) as stream:
        return try_lock(stream)


@atexit.register
def _close() -> None:
    for stream in _used.values():
        stream.close()


def _open(lease: Path) -> IO[str]:
    return lease.with_name(lease.name + ".users").open("a", encoding="utf-8")
