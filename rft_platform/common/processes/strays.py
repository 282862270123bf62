"""Find and end stray processes: started for a lease but not holding it, because their starter or parent was killed.

Every process that is started for a lease has the lease's path in its environment, and so have its descendants (ranks
of a launcher, an engine's workers). So they are found even if no lease file names them. Processes that a command
started in ``naming_starter`` also have the name of that command.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rft_platform.common.processes.lease import LEASE_VARIABLE, STARTER_VARIABLE
from rft_platform.common.processes.spawn import stop_process


def lease_environment(lease: Path) -> dict[str, str]:
    """Environment variables to set for a process that is started for ``lease``."""
    return {LEASE_VARIABLE: str(lease.absolute())}


@contextmanager
def naming_starter() -> Iterator[str]:
    """Give the processes started in the block, and their leases, a new name of their starter; yields this name."""
    outer, name = os.environ.get(STARTER_VARIABLE), f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[STARTER_VARIABLE] = name
    try:
        yield name
    finally:
        if outer is None:
            del os.environ[STARTER_VARIABLE]
        else:
            os.environ[STARTER_VARIABLE] = outer


def end_strays(lease: Path, timeout_s: float = 10.0, starter: str | None = None) -> list[int]:
    """End every process that was started for ``lease``, or only those that ``starter`` started; returns their ids.

    Call it while holding the lease's lock, before a new start: any process of the lease that still runs is a stray.
    """
    ended = []
    for process in started_for(lease, starter):
        with suppress(psutil.NoSuchProcess):
            stop_process(process, timeout_s)
            ended.append(process.pid)
    return ended


def started_for(lease: Path, starter: str | None = None) -> list[psutil.Process]:
    """Running processes that were started for ``lease``; with ``starter``, only those that it started."""
    return [process for process, found in _started(starter) if found == lease.absolute()]


def leases_started_below(folder: Path) -> set[Path]:
    """The leases in ``folder`` that running processes were started for, whether they hold them or not."""
    return {lease for _, lease in _started() if lease.parent == folder.absolute()}


def _started(starter: str | None = None) -> Iterator[tuple[psutil.Process, Path]]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ()
            lease = environment.get(LEASE_VARIABLE)
            if starter is not None and environment.get(STARTER_VARIABLE) != starter:
                continue
            if lease and process.status() != psutil.STATUS_ZOMBIE:
                yield process, Path(lease)
