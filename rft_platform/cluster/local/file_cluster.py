"""The part of a cluster that is kept in files of a project: start locks, users, generations and logs of its services.

Several processes may find or start a service at once. They hold the lock of its lease while they do, whatever cluster
runs the service.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rft_platform.cluster.interface import Address, Service, StartError, Status
from rft_platform.cluster.local.leases import note_use, release, used_leases
from rft_platform.cluster.local.locks import LOCK_TIMEOUT_S, locked
from rft_platform.cluster.this_process import is_interrupted
from rft_platform.common.errors import TransientError
from rft_platform.common.files import last_lines, write_text
from rft_platform.common.progress import announce

END_S = 10.0
_LOOK_S = 0.2
_START_WAIT_S = 15.0


class FileCluster(ABC):
    """What clusters have in common; ``leases`` and ``logs`` are folders, with some files of each service."""

    def __init__(self, leases: Path, logs: Path) -> None:
        self.folder, self.logs = leases, logs

    def ensure(self, service: Service) -> Address:
        """Find the service or start it, while holding the lock of its lease."""
        wait_s = LOCK_TIMEOUT_S + service.answer_s + service.start_timeout_s
        with locked(path := self.lease_file(service.name), wait_s):  # another caller may be starting the service
            note_use(path)
            if (address := self._fitting(service)) is not None:
                return address
            announce(f"{service.name}: starting")
            return self.start(service, self._next_generation(service.name))

    def stop(self, name: str, grace_s: float, *, generation: int | None = None, shutdown_path: str = "") -> bool:
        """End the service; without ``generation`` wait for a start under way, and end processes without a lease."""
        if generation is not None:
            return self._end(name, grace_s, shutdown_path, generation)
        if not self.folder.exists():
            return False
        with start_waited_for(self.lease_file(name)):
            ran = self._end(name, grace_s, shutdown_path)
            self._end_strays(name, grace_s)
            return ran

    def running(self, *patterns: str) -> list[Address]:
        """The addresses of the running services; with ``patterns``, of those with matching names."""
        return [status.address for status in self.services(*patterns).values() if status.runs]

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that the service printed, below a line that says where they are."""
        return tail(self.log_file(name), lines)

    def lease_file(self, name: str) -> Path:
        """The file whose lock is held while a service starts."""
        return self.folder / f"{name}.json"

    def log_file(self, name: str) -> Path:
        """Where a service prints to."""
        return self.logs / f"{name}.log"

    def wait_for_starts(self, *patterns: str) -> None:
        """Wait for services that are being started: a pool restarts lost replicas in the background."""
        for lock in [lock for each in patterns for lock in self.folder.glob(f"{each}.json.lock")]:
            # if a process takes longer to start, ``stop_strays`` finds it and ends it
            with start_waited_for(lock.with_suffix("")):
                pass

    def used(self) -> frozenset[str]:
        """The services of this cluster that this process uses."""
        return frozenset(lease.stem for lease in used_leases() if lease.parent == self.folder.absolute())

    def end_use(self, name: str, starter: str | None) -> None:
        """End this process's use of a service; end the service if a command started it and none uses it."""
        with start_waited_for(path := self.lease_file(name)):
            if not release(path) or starter is None:
                return
            if self._started_by(name) is not None:
                self._end(name, END_S)
                self._end_strays(name, END_S)
            self._end_strays(name, END_S, starter)  # processes whose start takes too long or was interrupted

    def _fitting(self, service: Service) -> Address | None:
        """The running ``service``; None if there is none. One that does not fit or answer is ended."""
        silent_at = time.monotonic() + service.answer_s
        while (address := self.find(service.name)) is not None:
            fits = address.digest == service.digest
            if fits and (self.answers(address) if service.is_ready is None else service.is_ready()):
                return address
            if not fits or time.monotonic() > silent_at:
                break
            check_interrupted(service.name)
            time.sleep(_LOOK_S)
        self._end(service.name, service.grace_s, service.shutdown_path, alone=service.leaves_work)
        return None

    def _next_generation(self, name: str) -> int:
        """Count the starts of a service. The caller holds the start lock."""
        counter = self.lease_file(name).with_suffix(".generation")
        generation = 1 + (int(text) if counter.exists() and (text := counter.read_text().strip()).isdigit() else 0)
        write_text(counter, str(generation))
        return generation

    @abstractmethod
    def find(self, name: str) -> Address | None:
        """The address of the service ``name``; None if its process does not run."""

    @abstractmethod
    def services(self, *patterns: str) -> dict[str, Status]:
        """The services by name; with ``patterns``, those with matching names."""

    @abstractmethod
    def answers(self, address: Address) -> bool:
        """Whether the service answers, and none of its processes is stopped."""

    @abstractmethod
    def start(self, service: Service, generation: int) -> Address:
        """Start a service that does not run; the caller holds the start lock. Raises ``StartError``."""

    @abstractmethod
    def _end(
        self, name: str, grace_s: float, shutdown_path: str = "", generation: int | None = None, alone: bool = False
    ) -> bool:
        """End a service and remove what remains of it; returns whether it ran. See ``Cluster.stop``.

        ``alone``: without the processes that it started.
        """

    @abstractmethod
    def _end_strays(self, name: str, grace_s: float, starter: str | None = None) -> None:
        """End processes that were started for the service ``name``, or only those that ``starter`` started."""

    @abstractmethod
    def _started_by(self, name: str) -> str | None:
        """The command that started the service; None if no command ends it, or there is none."""


def check_interrupted(name: str) -> None:
    """Raise ``StartError`` if this thread, which starts the service ``name``, has to end."""
    if is_interrupted():
        raise StartError(f"{name} is not needed any more: the command was interrupted")


class StartProgress:
    """Announces the stages of a service that is about to start, from the lines that it adds to its log."""

    def __init__(self, service: Service, log: Path) -> None:
        self._service, self._log = service, log
        self._read = log.stat().st_size if log.exists() else 0
        self._stage = ""

    def update(self) -> None:
        """Announce the stage of the newest line that names one, if it is another stage."""
        if not self._service.stages or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        complete = added[: max(added.rfind(b"\n"), added.rfind(b"\r")) + 1]  # a progress bar ends its states with \r
        self._read += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        reached = [stage for line in lines for text, stage in self._service.stages.items() if text in line]
        if reached and reached[-1] != self._stage:
            self._stage = reached[-1]
            announce(f"{self._service.name}: {self._stage}")


@contextmanager
def start_waited_for(path: Path) -> Iterator[None]:
    """Prevent that a process is started for a lease during the block.

    Waits up to ``_START_WAIT_S`` seconds until a running start has ended, then begins the block in any case.
    """
    with ExitStack() as stack:
        with suppress(TransientError):
            stack.enter_context(locked(path, _START_WAIT_S))
        yield


def tail(log_file: Path, lines: int = 20) -> str:
    """The last lines of a log, below a line that says where they are."""
    if not log_file.exists():
        return f"It wrote no log at {log_file}."
    return f"Last lines of {log_file}:\n{last_lines(log_file, lines)}"
