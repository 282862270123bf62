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
from rft_platform.common.processes.parent import STOP_APART_S, STOP_S, SUPERVISOR
from rft_platform.common.processes.signals import undisturbed
from rft_platform.common.processes.spawn import kill_process, stop_process, wait_until_ended
from rft_platform.common.threads import DaemonThreads
from rft_platform.observability.log_rotation import bound_logs_now_and_then
from rft_platform.servers.restarts import (
    AT_ONCE,
    LONGEST_WAIT_S,
    recent,
    report_failing,
    report_running,
    wait_before_restart,
)

LOG = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_POLL_S = 0.2
_KILLED_S = 5.0
_PROBE_INTERVAL_S = 10.0
_EARLY_S = 20.0  # only a server that ends so soon after its start waits for its restart
_STABLE_S = 60.0  # a server that runs for this long is no longer reported as failing
_SILENT_TIMEOUT_S = 180.0  # a server that is not ready for this long (stopped, or hangs) is killed


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
    restarts: bool = False
    """Whether the server is started again when it ends; otherwise its end ends the command."""
    leaves_work: bool = False
    """Whether the server's child processes (running Dagster runs) survive its death; they end with the command."""


@dataclass(frozen=True, slots=True)
class Child:
    """A started server. It has its own session, so Ctrl-C in the terminal does not reach it."""

    server: Server
    process: psutil.Popen
    started: float  # monotonic time
    log: Path

    def check(self) -> None:
        """Raise RftError with the end of the log if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise RftError(
                f"{self.server.name} ended with exit code {code}; the end of {self.log}:\n{last_lines(self.log)}"
            )


class Children(list[Child]):
    """The servers in start order; ``left`` has dead servers whose child processes may still run."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths: dict[str, list[float]] = {}  # recent ones, monotonic times by server name
        self._early: dict[str, list[float]] = {}  # those soon after a start
        self.left: list[Child] = []
        self._restart_at: dict[str, float] = {}  # dead servers that wait for their restart
        self._reported: set[str] = set()  # servers that are reported as failing

    def restart_ended(self) -> Iterator[str]:
        """Restart the servers that have ended and need not wait longer; yields a message about each end.

        Raises RftError if a server has ended that is not to be restarted.
        """
        for number, child in enumerate(self):
            name = child.server.name
            if child.process.poll() is None:
                if name in self._reported and time.monotonic() - child.started > _STABLE_S:
                    self._reported.remove(name)
                    report_running(child.log.parent, name)
                continue
            if not child.server.restarts:
                child.check()
            if name not in self._restart_at:
                yield self._note_death(child)
            if time.monotonic() >= self._restart_at[name]:
                self.start_again(number)

    def forget_reports(self) -> None:
        """Remove the reports of failing servers, because the command stops all servers."""
        for child in self:
            if child.server.name in self._reported:
                report_running(child.log.parent, child.server.name)

    def _note_death(self, child: Child) -> str:
        """Decide when a dead server is restarted; returns a message."""
        name, now = child.server.name, time.monotonic()
        deaths = self.deaths[name] = [*recent(self.deaths.get(name, ()), now), now]
        early = self._early[name] = recent(self._early.get(name, ()), now)
        if now - child.started < _EARLY_S:
            early.append(now)
        wait = wait_before_restart(len(early))
        self._restart_at[name] = now + wait
        ended = f"{name} ended with exit code {child.process.returncode}"
        if len(deaths) <= AT_ONCE:
            return f"{ended}: started again, see {child.log}"
        ended += f", {len(deaths)} times in ten minutes: started again{f' in {wait:.0f} s' if wait else ''}"
        try:
            report_failing(child.log.parent, name, f"{ended}; the end of {child.log}:\n{last_lines(child.log, 3)}")
            self._reported.add(name)
        except OSError as error:  # a full disk must not end the command
            LOG.warning("the state of %s cannot be stored: %s", name, error)
        return f"{ended}, see {child.log}"

    def start_again(self, number: int) -> None:
        """Restart the dead server at ``number`` without a wait, or later if the machine cannot start a process now."""
        child = self[number]
        name = child.server.name
        if child.server.leaves_work:
            self.left = [each for each in [*self.left, child] if _members(each.process.pid)]
        else:
            _kill_group(child)
        try:
            self[number] = _start(child.server, child.log.parent)
            self._restart_at.pop(name, None)
        except OSError as error:  # no memory, no file handles, full disk
            LOG.error("%s cannot be started and will be retried: %s", name, error)
            self._restart_at[name] = time.monotonic() + LONGEST_WAIT_S


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

    A server that ends again and again soon after its start is restarted with increasing pauses, while the others keep
    running. A server that no longer answers is killed and counts as ended. Raises RftError when a server ends that is
    not to be restarted.
    """
    probes = _Probes()
    while True:
        probes.kill_silent(children)
        for message in children.restart_ended():
            report(message)
        for folder in {child.log.parent for child in children}:
            bound_logs_now_and_then(folder)
        time.sleep(_POLL_S)


class _Probes:
    """Checks in a thread whether each server is ready, one after another, and stores the time of each success."""

    def __init__(self) -> None:
        self._pool = DaemonThreads("probes")  # the end of the command does not wait for a check
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
        process = psutil.Popen(
            server.command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**server.env, SUPERVISOR: str(os.getpid())},
            start_new_session=True,
        )
    return Child(server, process, time.monotonic(), log)


def _wait_until_ready(children: Children) -> None:
    """Wait until all servers are ready; one that ends by itself meanwhile is an error, one that was killed restarts."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    waiting = list(children)
    while waiting:
        for child in children:
            code = child.process.poll()
            if code is None or code >= 0 or len(children.deaths.get(child.server.name, ())) >= AT_ONCE:
                child.check()  # only a server that was killed, for example for memory, is no mistake of the user
        for message in children.restart_ended():
            LOG.warning("%s", message)
        waiting = [child for child in waiting if not child.server.is_ready()]
        if waiting and time.monotonic() > deadline:
            name, log = waiting[0].server.name, waiting[0].log
            raise RftError(f"{name} was not ready after {_START_TIMEOUT_S:.0f} s; the end of {log}:\n{last_lines(log)}")
        if waiting:
            time.sleep(_POLL_S)


def _stop(children: Children) -> None:
    """Stop all servers concurrently, each with its child processes. A second signal meanwhile kills them."""
    if not children:
        return
    with ThreadPoolExecutor(len(children) + len(children.left)) as pool:
        try:
            children.forget_reports()
            left = [pool.submit(_end_group, child) for child in children.left]
            list(pool.map(lambda child: stop_process(child.process, STOP_S, STOP_APART_S), children))
            for ending in left:
                ending.result()
        finally:
            with undisturbed():
                for child in [*children, *children.left]:
                    kill_process(child.process)
                    _kill_group(child)  # processes that a killed server left behind
                wait_until_ended([child.process for child in children], _KILLED_S)


def _end_group(child: Child) -> None:
    """End the processes left in a dead server's group: SIGTERM, then SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, signal.SIGTERM)
    wait_until_ended(_members(child.process.pid), STOP_S)
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
