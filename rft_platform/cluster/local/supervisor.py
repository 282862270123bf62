"""Services that live as long as a command: a thread for each ensures that it runs, and ends it with the command.

The first three restarts of a service within ten minutes are immediate. Further ones wait, up to a minute, so that a
service that ends soon after each start does not take the processor time of the others. Nothing is given up: the cause
(a full disk, a database that is down) may end at any time. A service ends with its command, however that ended
(``Service.ends_with_starter``).
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import psutil

from rft_platform.cluster.interface import Address, Service, StartError
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.log_files import bound_logs_now_and_then
from rft_platform.cluster.local.processes import exit_code
from rft_platform.cluster.this_process import interrupt, undisturbed
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.common.files import last_lines, read_json, write_json

LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_PROBE_INTERVAL_S = 10.0
_EARLY_S = 20.0  # only a service that ends so soon after its start waits for its restart
_STABLE_S = 60.0  # a service that runs for this long is no longer reported as failing
_WITHIN_S = 600.0  # earlier failures do not count
AT_ONCE = 3  # restarts without a wait
_FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
_SUFFIX = ".failing.json"
_LONGEST_MESSAGE = 500  # characters
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class End:
    """The end of a service that its command did not end."""

    name: str
    pid: int | None  # None: it was not ready in time
    exit_code: int | None
    message: str  # with the time of the restart


@dataclass(slots=True)
class Failures:
    """The times of the failures of the last ten minutes."""

    times: list[float] = field(default_factory=list)

    def add(self, now: float) -> int:
        """Add a failure at ``now``; returns the number of failures that count."""
        self.times = [*(at for at in self.times if now - at < _WITHIN_S), now]
        return len(self.times)


def wait_before_restart(failures: int) -> float:
    """Seconds to wait after this number of recent failures."""
    if failures <= AT_ONCE:
        return 0.0
    return float(min(_FIRST_WAIT_S * 2 ** (failures - AT_ONCE - 1), LONGEST_WAIT_S))


class Supervisor:
    """The services of a command. ``ends`` has an entry for each service that has ended by itself or was killed."""

    def __init__(self, cluster: LocalCluster, services: Sequence[Service]) -> None:
        digest = secrets.token_hex(8)  # a service of another command, which may still be ending, is replaced
        own = [replace(service, digest=digest, ends_with_starter=True) for service in services]
        self.ends: SimpleQueue[End] = SimpleQueue()
        self._cluster = cluster
        self._keepers = [_Keeper(cluster, service, self.ends) for service in own]

    def start(self) -> None:
        """Start all services and wait until they are ready."""
        for keeper in self._keepers:
            keeper.start()
        while not all(keeper.started.is_set() for keeper in self._keepers):
            self._check()
            time.sleep(_POLL_S)

    def watch(self, report: Callable[[End], None] = lambda end: None) -> None:
        """Wait until Ctrl-C; ``report`` receives the ends of services.

        Raises RftError if a service cannot be started any more.
        """
        while True:
            self._check()
            bound_logs_now_and_then(self._cluster.logs)
            with suppress(Empty):
                report(self.ends.get(timeout=_POLL_S))

    def _check(self) -> None:
        for error in [keeper.error for keeper in self._keepers if keeper.error is not None]:
            raise error

    def stop(self) -> None:
        """End all services concurrently, with what they started. A second signal meanwhile kills them."""
        try:
            running = [keeper for keeper in self._keepers if keeper.is_alive()]
            for keeper in running:
                keeper.end()
            for keeper in running:
                keeper.join()
        except BaseException:
            with undisturbed():
                self._cluster.stop_strays(0.0)
            raise


@contextmanager
def serving(cluster: LocalCluster, services: Sequence[Service]) -> Iterator[Supervisor]:
    """Start the services and wait until each is ready; stop all of them when the block ends in any way.

    Raises RftError with the end of the log if a service ends by itself while it starts, or is not ready in time.
    """
    supervisor = Supervisor(cluster, services)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


class _Keeper(threading.Thread):
    """Starts a service, starts it again whenever it has ended, and ends it with the command."""

    def __init__(self, cluster: LocalCluster, service: Service, ends: "SimpleQueue[End]") -> None:
        super().__init__(name=service.name, daemon=True)
        self._cluster, self._service, self._ends = cluster, service, ends
        self.started, self._ending = threading.Event(), threading.Event()
        self.error: Exception | None = None  # why the service cannot run
        self._all, self._early = Failures(), Failures()
        self._since = 0.0  # monotonic time of the newest start
        self._is_reported = False  # as failing

    def end(self) -> None:
        """Let the thread end the service, and then itself."""
        self._ending.set()
        interrupt(self)

    def run(self) -> None:
        """Keep the service running until ``end`` is called, or an error shows that it cannot run."""
        try:
            while not self._ending.is_set():
                self._ending.wait(self._live())
        except Exception as error:
            self.error = error
        finally:
            if self._is_reported:
                report_running(self._cluster.logs, self._service.name)
            self._cluster.stop(self._service.name, self._service.grace_s)

    def _live(self) -> float:
        """Start the service and watch it until it has ended; returns the seconds to wait before the next start."""
        self._since = time.monotonic()
        try:
            address = self._cluster.ensure(self._service)
            self.started.set()
            while (ended := self._watch(address)) is None and not self._ending.is_set():
                replaced = self._cluster.ensure(self._service)
                if replaced != address:
                    self._note_end(_pid(address), None, "did not answer")
                    address, self._since = replaced, time.monotonic()
            return 0.0 if ended is None else self._note_end(ended, _exit_code(ended))
        except StartError as error:
            by_itself = error.exit_code is None or error.exit_code >= 0  # a killed process is no mistake of the user
            if not self.started.is_set() and (by_itself or len(self._all.times) >= AT_ONCE):
                raise
            return self._note_end(error.pid, error.exit_code, "was not ready in time")
        except Exception as error:  # no memory, no file handles, full disk, a database that is down
            if isinstance(error, RftError) or not self.started.is_set():
                raise
            LOG.error("%s cannot be started or checked, which will be retried: %s", self._service.name, error)
            return LONGEST_WAIT_S

    def _watch(self, address: Address) -> int | None:
        """Wait until the service has ended, and return its process id; None when it is time to check its answers."""
        until = time.monotonic() + _PROBE_INTERVAL_S
        while self._cluster.find(address.name) == address:
            if time.monotonic() > until or self._ending.wait(_POLL_S):
                return None
            if self._is_reported and time.monotonic() - self._since > _STABLE_S:
                self._is_reported = False
                report_running(self._cluster.logs, address.name)
        return _pid(address)

    def _note_end(self, pid: int | None, code: int | None, otherwise: str = "ended") -> float:
        """Report that the service has ended; returns the seconds to wait before its restart."""
        name, now = self._service.name, time.monotonic()
        log, times = self._cluster.log_file(name), self._all.add(now)
        wait = wait_before_restart(self._early.add(now)) if now - self._since < _EARLY_S else 0.0
        message = f"{name} {otherwise if code is None else f'ended with exit code {code}'}"
        if times > AT_ONCE:
            message += f", {times} times in ten minutes: started again{f' in {wait:.0f} s' if wait else ''}"
            try:
                report_failing(log.parent, name, f"{message}; the end of {log}:\n{last_lines(log, 3)}")
                self._is_reported = True
            except OSError as error:  # a full disk must not end the command
                LOG.warning("the state of %s cannot be stored: %s", name, error)
        else:
            message += ": started again"
        self._ends.put(End(name, pid, code, f"{message}, see {log}"))
        return wait


def _pid(address: Address) -> int:
    return int(address.details["pid"])


def _exit_code(pid: int) -> int | None:
    """Exit code of an ended child; None if it was already reaped, or still runs."""
    with suppress(psutil.Error):
        return exit_code(psutil.Process(pid))
    return None


def report_failing(logs: Path, name: str, message: str) -> None:
    """Store why a server of this command is not running. ``failing_servers`` reads it, also in other processes."""
    write_json(logs / f"{name}{_SUFFIX}", {"at": time.time(), "message": message})


def report_running(logs: Path, name: str) -> None:
    """Remove the report of a server that runs again, or that its command has stopped."""
    (logs / f"{name}{_SUFFIX}").unlink(missing_ok=True)


def failing_servers(logs: Path) -> list[str]:
    """A message for each server that is failing; reports of a command that was killed expire."""
    found = []
    for file in sorted(logs.glob(f"*{_SUFFIX}")):
        try:
            report = read_json(file)
            if time.time() - report["at"] < _WITHIN_S:
                found.append(str(report["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # removed meanwhile, or damaged: the log has the message, too
    return found


class EngineStarts(Generic[T]):
    """Starts an engine, and waits longer after each failed start; any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = Failures()
        self._next_at = 0.0
        self.problem: str | None = None  #: why the engine does not run; None: its last start succeeded

    def attempt(self, start: Callable[[], T]) -> T:
        """What ``start`` returns. Raises EngineError without a start while the wait after a failed start lasts."""
        with self._lock:
            now = self._clock()
            if now < self._next_at:
                raise EngineError(f"{self.problem}; the next start is in {self._next_at - now:.0f} s")
            try:
                started = start()
            except (EngineError, UserError) as error:
                now = self._clock()
                times = self._failures.add(now)
                self._next_at = now + wait_before_restart(times)
                reason = str(error).partition("\n")[0][:_LONGEST_MESSAGE]
                self.problem = f"the engine could not be started {times} times in ten minutes: {reason}"
                raise
            self._failures, self.problem = Failures(), None
            return started
