"""Lease files: how a long-lived process is found again by whoever needs it next.

A server writes its lease when it is ready to serve and removes it when it ends. A lease left behind by a crash names a
process that is gone (pid and creation time together tell), and is then simply replaced.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rft_platform.files import atomic_path, read_json

CREATE_TIME_TOLERANCE_S = 1.0  # the kernel's boot time, from which creation times derive, moves when the clock is set


@dataclass
class Lease:
    """Who serves, where, and the token that its control plane asks for (so the file is readable by its owner only)."""

    kind: str  # "engine-transformers", "trainer", ...
    pid: int
    create_time: float  # seconds since the epoch, as psutil gives it
    host: str
    port: int
    token: str = field(repr=False)
    model_digest: str
    started_at: float  # seconds since the epoch
    details: dict[str, Any]


def read_lease(path: Path) -> Lease | None:
    """The lease at ``path``, or None where there is none (or where it is not one of this version's)."""
    try:
        return Lease(**read_json(path))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_lease(path: Path, lease: Lease) -> None:
    """Publish ``lease`` atomically, readable by its owner only from the first byte on."""
    with atomic_path(path) as temp:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(asdict(lease), stream)


def remove_lease(path: Path, pid: int) -> None:
    """Remove the lease if process ``pid`` owns it; a successor's lease stays."""
    lease = read_lease(path)
    if lease is not None and lease.pid == pid:
        path.unlink(missing_ok=True)


def find_process(pid: int, create_time: float) -> psutil.Process | None:
    """The running process with this pid and creation time; None where it ended or the pid was given to another."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) <= CREATE_TIME_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def is_alive(lease: Lease) -> bool:
    """Whether the process that wrote ``lease`` still runs."""
    return find_process(lease.pid, lease.create_time) is not None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock beside ``path``, so that two callers never start two servers for one lease.

    The kernel releases the lock when its holder ends, however it ends; the lock file itself stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
