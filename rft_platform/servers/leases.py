"""Find and end a project's long-lived processes by their lease files: engine replicas, auxiliary models, trainer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rft_platform.common.errors import TransientError
from rft_platform.common.locks import locked
from rft_platform.common.processes.lease import Lease, is_alive, read_lease, remove_lease
from rft_platform.common.processes.spawn import lease_root, stop_holder
from rft_platform.common.processes.strays import end_strays, leases_started_below
from rft_platform.common.processes.usage import release
from rft_platform.config.home import Home

_START_WAIT_S = 15.0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease file and its content."""

    path: Path
    lease: Lease

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the lease still runs."""
        return is_alive(self.lease)

    @property
    def identity(self) -> tuple[int, float]:
        """Process id and creation time, which together identify one process for ever."""
        return self.lease.pid, self.lease.create_time


def leases_of(home: Home) -> list[HeldLease]:
    """All leases of a project, whether their processes run or not."""
    found = [(path, read_lease(path)) for path in sorted(home.leases.glob("*.json"))]
    return [HeldLease(path, lease) for path, lease in found if lease is not None]


def wait_for_starts(home: Home) -> None:
    """Wait for engine processes that are being started: a pool restarts lost replicas in the background."""
    engines = ("engine*", "auxiliary-*", "policy-*")
    for lock in [lock for name in engines for lock in home.leases.glob(f"{name}.json.lock")]:
        # if a process takes longer to start, ``stop_strays`` finds it by its environment and ends it
        with _start_waited_for(lock.with_suffix("")):
            pass


def stop(held: HeldLease) -> bool:
    """End a lease's processes and remove the lease; returns whether its holder was alive."""
    alive = stop_holder(held.lease)
    end_strays(held.path)
    remove_lease(held.path, held.lease.pid)
    return alive


def end_use(path: Path, starter: str | None) -> None:
    """End this command's use of a lease's processes; end the processes if a command started them and none uses them.

    ``starter`` is the name of this command; None if the command leaves the processes running.
    """
    with _start_waited_for(path):
        if not release(path) or starter is None:
            return
        lease = read_lease(path)
        if lease is not None and lease.started_by is not None:
            stop(HeldLease(path, lease))
        end_strays(path, starter=starter)  # processes whose start takes too long or was interrupted


def stop_strays(home: Home) -> list[int]:
    """End processes that were started for this project's leases; returns their ids."""
    return [pid for path in leases_started_below(home.leases) for pid in end_strays(path)]


@contextmanager
def _start_waited_for(path: Path) -> Iterator[None]:
    """Prevent that a process is started for a lease during the block.

    Waits up to ``_START_WAIT_S`` seconds until a running start has ended, then begins the block in any case.
    """
    with ExitStack() as stack:
        with suppress(TransientError):
            stack.enter_context(locked(path, _START_WAIT_S))
        yield


def processor_seconds(held: HeldLease) -> float:
    """Processor time that a lease's processes have used since their start."""
    root = lease_root(held.lease)
    return 0.0 if root is None else sum(map(_used, [root, *root.children(recursive=True)]))


def _used(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)
