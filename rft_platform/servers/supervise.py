"""Supervisor of servers that live as long as a command: start them together, watch, restart, and stop them."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft_platform.common.errors import RftError
from rft_platform.common.files import last_lines
from rft_platform.common.processes.spawn import stop_process, wait_until_ended
from rft_platform.observability.log_rotation import bound_logs_now_and_then

LOG = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
_PROBE_INTERVAL_S = 10.0
_SILENT_TIMEOUT_S = 180.0  # a server that is not ready for this long (stopped, or hangs) is killed
_RESTARTS_WITHIN_S = 600.0  # earlier deaths do not count towards the limit of restarts


@dataclass(frozen=True, slots=True)
class Server:
    """One server. If its command is empty, the server runs elsewhere and is only listed."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    is_ready: Callable[[], bool]
    url: str | None = None
    pages: Mapping[str, str] = field(default_factory=dict)
    """Addresses of start pages, by their content."""
    restarts: int = 0
    """Maximum number of restarts within ten minutes; the next death ends the command."""
    leaves_work: bool = False
    """Whether the server's child processes (running Dagster runs) survive its death; they end with the command."""


@dataclass(frozen=True, slots=True)
class Child:
    """A started server. It has its own session, so Ctrl-C in the terminal does not reach it."""

    server: Server
    process: subprocess.Popen[bytes]
    created: float
    log: Path

    def check(self) -> None:
        """Raise RftError with the end of the log if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise RftError(
                f"{self.server.name} ended with exit code {code}; the end of {self.log}:\n{last_lines(self.log)}"
            )


class Children(list[Child]):
    """The running servers in start order; ``left`` has dead servers whose child processes may still run."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths: dict[str, list[float]] = {}  # monotonic times, by server name
        self.left: list[Child] = []

    def start_again(self, number: int) -> str:
        """Restart the dead server at ``number``; returns a message. Raises RftError at the limit of restarts."""
        child, now = self[number], time.monotonic()
        server = child.server
        recent = [at for at in self.deaths.get(server.name, []) if now - at < _RESTARTS_WITHIN_S]
        if len(recent) >= server.restarts:
            child.check()
        self.deaths[server.name] = [*recent, now]
        if server.leaves_work:
            self.left.append(child)
        else:
            _kill_group(child)
        self[number] = _start(server, child.log.parent)
        again = f"started again ({len(recent) + 1} of {server.restarts} times)"
        return f"{server.name} ended with exit code {child.process.returncode}: {again}, see {child.log}"


@contextmanager
def serving(servers: Sequence[Server], logs: Path) -> Iterator[Children]:
    """Start the servers and wait until each is ready; stop all of them when the block ends in any way.

    Raises RftError with the end of the log if a server ends by itself or is not ready in time.
    """
    children = Children()
    try:
        for server in servers:
            if server.command:
                children.append(_start(server, logs))
        _wait_until_ready(children)
        yield children
    finally:
        _stop(children)


def wait_for_end(children: Children, report: Callable[[str], None] = lambda line: None) -> None:
    """Watch the servers until Ctrl-C and restart a server that ends; ``report`` receives a line about each restart.

    Raises RftError when a server ends that has reached its limit of restarts. A server that no longer answers is killed
    and counts as ended.
    """
    probes = _Probes()
    while True:
        probes.kill_silent(children)
        for number, child in enumerate(children):
            if child.process.poll() is not None:
                report(children.start_again(number))
        for folder in {child.log.parent for child in children}:
            bound_logs_now_and_then(folder)
        time.sleep(_POLL_S)


class _Probes:
    """Checks in a thread whether each server is ready, one after another, and stores the time of each success."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._asked: Future[None] | None = None
        self._asked_at = time.monotonic()
        self._ready_at: dict[int, float] = {}  # by process id

    def kill_silent(self, children: Children) -> None:
        """Kill each server that was not ready for ``_SILENT_TIMEOUT_S``, and start new checks without waiting."""
        now = time.monotonic()
        for child in children:
            if now - self._ready_at.setdefault(child.process.pid, now) > _SILENT_TIMEOUT_S:
                child.process.kill()
        if now - self._asked_at > _PROBE_INTERVAL_S and (self._asked is None or self._asked.done()):
            self._asked, self._asked_at = self._pool.submit(self._ask, list(children)), now

    def _ask(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.server.is_ready():
                self._ready_at[child.process.pid] = time.monotonic()


def _start(server: Server, logs: Path) -> Child:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{server.name.lower()}.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(server.env),
            start_new_session=True,
        )
    return Child(server, process, psutil.Process(process.pid).create_time(), log)


def _wait_until_ready(children: Children) -> None:
    """Wait until all servers are ready; one that ends by itself meanwhile is an error, one that was killed restarts."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    waiting = list(children)
    while waiting:
        for number, child in enumerate(children):
            code = child.process.poll()
            if code is not None and code < 0:  # killed from outside, for example for memory: no mistake of the user
                LOG.warning("%s", children.start_again(number))
            else:
                child.check()
        waiting = [child for child in waiting if not child.server.is_ready()]
        if waiting and time.monotonic() > deadline:
            name, log = waiting[0].server.name, waiting[0].log
            raise RftError(f"{name} was not ready after {_START_TIMEOUT_S:.0f} s; the end of {log}:\n{last_lines(log)}")
        if waiting:
            time.sleep(_POLL_S)


def _stop(children: Children) -> None:
    """Stop all servers concurrently, each with its child processes."""
    if not children:
        return
    with ThreadPoolExecutor(len(children) + len(children.left)) as pool:
        left = [pool.submit(_end_group, child) for child in children.left]
        list(pool.map(lambda child: stop_process(child.process.pid, child.created, _STOP_TIMEOUT_S), children))
        for ending in left:
            ending.result()
    for child in children:
        child.process.wait()
        _kill_group(child)  # processes that a killed server left behind


def _end_group(child: Child) -> None:
    """End the processes left in a dead server's group: SIGTERM, then SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGTERM)
    wait_until_ended(_members(child.process.pid), _STOP_TIMEOUT_S)
    _kill_group(child)


def _members(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _kill_group(child: Child) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGKILL)
