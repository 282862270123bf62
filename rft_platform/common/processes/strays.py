"""Find and end stray processes: started for a lease but not holding it, because their starter or parent was killed.

Every process that is started for a lease has the lease's path in its environment, and so have its descendants (ranks
of a launcher, an engine's workers). They are therefore found even if they wrote nothing.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from rft_platform.common.processes.lease import LEASE_VARIABLE
from rft_platform.common.processes.spawn import stop_process


def lease_environment(lease: Path) -> dict[str, str]:
    """Environment variables to set for a process that is started for ``lease``."""
    return {LEASE_VARIABLE: str(lease.absolute())}


def end_strays(lease: Path, timeout_s: float = 10.0) -> list[int]:
    """End every process that was started for ``lease``; returns their ids.

    Call it while holding the lease's lock, before a new start: processes that still run then were lost, or outlived
    their main process.
    """
    ended = []
    for process in started_for(lease):
        with suppress(psutil.NoSuchProcess):
            stop_process(process.pid, process.create_time(), timeout_s)
            ended.append(process.pid)
    return ended


def started_for(lease: Path) -> list[psutil.Process]:
    """Running processes that were started for ``lease``."""
    return [process for process, found in _started() if found == lease.absolute()]


def leases_started_below(folder: Path) -> set[Path]:
    """The leases in ``folder`` that running processes were started for, whether they hold them or not."""
    return {lease for _, lease in _started() if lease.parent == folder.absolute()}


def _started() -> Iterator[tuple[psutil.Process, Path]]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            lease = process.environ().get(LEASE_VARIABLE)
            if lease and process.status() != psutil.STATUS_ZOMBIE:
                yield process, Path(lease)
