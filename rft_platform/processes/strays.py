"""Processes that were started for a lease and do not hold it: their starter, or the process they served, was killed.

Every process that is started for a lease carries the lease's path in its environment, and so does whatever it starts
itself (ranks of a launcher, an engine's own workers). So they are found however little they got to write.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from rft_platform.processes.lease import LEASE_VARIABLE
from rft_platform.processes.spawn import stop_process


def lease_environment(lease: Path) -> dict[str, str]:
    """What the environment of a process that is started for ``lease`` must hold."""
    return {LEASE_VARIABLE: str(lease.absolute())}


def end_strays(lease: Path, timeout_s: float = 10.0) -> list[int]:
    """End every process that was started for ``lease``; returns their ids.

    For the holder of the lease's lock who is about to start a new one: whoever still runs then was never found again
    by anybody, or outlived its own main process.
    """
    ended = []
    for process in started_for(lease):
        with suppress(psutil.NoSuchProcess):
            stop_process(process.pid, process.create_time(), timeout_s)
            ended.append(process.pid)
    return ended


def started_for(lease: Path) -> list[psutil.Process]:
    """Living processes that were started for ``lease``."""
    return [process for process, found in _started() if found == lease.absolute()]


def leases_started_below(folder: Path) -> set[Path]:
    """The leases in ``folder`` that living processes were started for, whether these hold them or not."""
    return {lease for _, lease in _started() if lease.parent == folder.absolute()}


def _started() -> Iterator[tuple[psutil.Process, Path]]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            lease = process.environ().get(LEASE_VARIABLE)
            if lease and process.status() != psutil.STATUS_ZOMBIE:
                yield process, Path(lease)
