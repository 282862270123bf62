"""The long-lived processes of a project, found by their lease files: engine and trainer."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from rft_platform.config.home import Home
from rft_platform.processes.lease import Lease, is_alive, read_lease, remove_lease
from rft_platform.processes.spawn import stop_process


@dataclass(frozen=True, slots=True)
class Held:
    """A lease file and what it says."""

    path: Path
    lease: Lease

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        return is_alive(self.lease)

    @property
    def identity(self) -> tuple[int, float]:
        """Process id and creation time: together they name one process for good."""
        return self.lease.pid, self.lease.create_time


def leases_of(home: Home) -> list[Held]:
    """All leases below a project's folder, whether their processes live or not."""
    found = [(path, read_lease(path)) for path in sorted(home.leases.glob("*.json"))]
    return [Held(path, lease) for path, lease in found if lease is not None]


def stop(held: Held) -> bool:
    """End a lease's process (group) and remove the lease; returns whether it was alive."""
    alive = held.alive
    if alive:
        stop_process(*held.identity)
    remove_lease(held.path, held.lease.pid)
    return alive


def processor_seconds(held: Held) -> float:
    """Processor time that the process of a lease and all others of its session have used."""
    if not held.alive:
        return 0.0
    session = os.getsid(held.lease.pid)
    return sum(_processor_seconds(process) for process in psutil.process_iter() if _session(process) == session)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def _processor_seconds(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)
