"""Servers that live as long as a command: the supervisor starts, watches, restarts and stops them.

The first three restarts of a server within ten minutes are immediate. Further ones wait, up to a minute, so that a
server that ends soon after each start does not take the processor time of the others. Nothing is given up: the cause
(a full disk, a database that is down) may end at any time.

A server ends with its supervisor, however that ended: a killed supervisor stops nothing itself. ``python -m
rft_platform.cluster.local.supervisor run COMMAND ...`` runs a command of another package as such a server. ``... stop
PID`` stops process PID as its supervisor would have done. It is another process, because it has to outlive the server
that starts it.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import command_of
from rft_platform.cluster.local.log_files import bound_logs_now_and_then
from rft_platform.cluster.local.processes import (
    end_group,
    kill_group,
    kill_process,
    members,
    stop_process,
    wait_until_ended,
)
from rft_platform.cluster.this_process import undisturbed
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.common.files import last_lines, read_json, write_json
from rft_platform.common.threads import DaemonThreads

LOG = logging.getLogger(__name__)
#: Environment variable with the process id of the supervisor that started a server.
SUPERVISOR = "RFT_SUPERVISOR"
#: Seconds that a server has to end, and then its descendants in other process groups, before they are killed.
STOP_S, STOP_APART_S = 7.0, 4.0
_THIS = "rft_platform.cluster.local.supervisor"  # ``__name__`` is another one if this module is run
_POLL_S = 0.2
_WATCH_S = 0.5
_KILLED_S = 5.0
_PROBE_INTERVAL_S = 10.0
_EARLY_S = 20.0  # only a server that ends so soon after its start waits for its restart
_STABLE_S = 60.0  # a server that runs for this long is no longer reported as failing
_SILENT_TIMEOUT_S = 180.0  # a server that is not ready for this long (stopped, or hangs) is killed
_WITHIN_S = 600.0  # earlier failures do not count
AT_ONCE = 3  # restarts without a wait
_FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
_SUFFIX = ".failing.json"
_LONGEST_MESSAGE = 500  # characters
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Server:
    """A service that lives as long as a command. If it has no module, it runs elsewhere and is only listed."""

    service: Service
    is_ready: Callable[[], bool]
    url: str | None = None
    pages: Mapping[str, str] = field(default_factory=dict)
    """Addresses of start pages, by their content."""
    restarts: bool = False
    """Whether the server is started again when it ends; otherwise its end ends the command."""
    leaves_work: bool = False
    """Whether the server's child processes (running Dagster runs) survive its death; they end with the command."""

    @property
    def name(self) -> str:
        """The name for people; in lower case that of its log."""
        return self.service.name


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
            self.left = [each for each in [*self.left, child] if members(each.process.pid)]
        else:
            kill_group(child.process.pid)
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
            if server.service.module:
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
            command_of(server.service),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.service.env, SUPERVISOR: str(os.getpid())},
            start_new_session=True,
        )
    return Child(server, process, time.monotonic(), log)


def _wait_until_ready(children: Children) -> None:
    """Wait until all servers are ready; one that ends by itself meanwhile is an error, one that was killed restarts."""
    began, waiting = time.monotonic(), list(children)
    while waiting:
        for child in children:
            code = child.process.poll()
            if code is None or code >= 0 or len(children.deaths.get(child.server.name, ())) >= AT_ONCE:
                child.check()  # only a server that was killed, for example for memory, is no mistake of the user
        for message in children.restart_ended():
            LOG.warning("%s", message)
        waiting = [child for child in waiting if not child.server.is_ready()]
        for child in waiting:
            if time.monotonic() - began > (limit := child.server.service.start_timeout_s):
                end = f"the end of {child.log}:\n{last_lines(child.log)}"
                raise RftError(f"{child.server.name} was not ready after {limit:.0f} s; {end}")
        if waiting:
            time.sleep(_POLL_S)


def _stop(children: Children) -> None:
    """Stop all servers concurrently, each with its child processes. A second signal meanwhile kills them."""
    if not children:
        return
    with ThreadPoolExecutor(len(children) + len(children.left)) as pool:
        try:
            children.forget_reports()
            left = [pool.submit(end_group, child.process.pid, STOP_S) for child in children.left]
            list(pool.map(_stop_child, children))
            for ending in left:
                ending.result()
        finally:
            with undisturbed():
                for child in [*children, *children.left]:
                    kill_process(child.process)
                    kill_group(child.process.pid)  # processes that a killed server left behind
                wait_until_ended([child.process for child in children], _KILLED_S)


def _stop_child(child: Child) -> None:
    stop_process(child.process, child.server.service.grace_s, STOP_APART_S)


def recent(failures: Sequence[float], now: float) -> list[float]:
    """The times of the failures that count."""
    return [at for at in failures if now - at < _WITHIN_S]


def wait_before_restart(failures: int) -> float:
    """Seconds to wait after this number of recent failures."""
    if failures <= AT_ONCE:
        return 0.0
    return float(min(_FIRST_WAIT_S * 2 ** (failures - AT_ONCE - 1), LONGEST_WAIT_S))


def report_failing(logs: Path, name: str, message: str) -> None:
    """Store why a server of this command is not running. ``failing_servers`` reads it, also in other processes."""
    write_json(logs / f"{name.lower()}{_SUFFIX}", {"at": time.time(), "message": message})


def report_running(logs: Path, name: str) -> None:
    """Remove the report of a server that runs again, or that its command has stopped."""
    (logs / f"{name.lower()}{_SUFFIX}").unlink(missing_ok=True)


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
        self._failures: list[float] = []
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
                self._failures = [*recent(self._failures, now), now]
                self._next_at = now + wait_before_restart(len(self._failures))
                reason = str(error).partition("\n")[0][:_LONGEST_MESSAGE]
                times = len(self._failures)
                self.problem = f"the engine could not be started {times} times in ten minutes: {reason}"
                raise
            self._failures, self.problem = [], None
            return started


def end_with_supervisor() -> None:
    """End this process and its descendants when the supervisor ends, if one started it. Call it first in a server."""
    supervisor = os.environ.pop(SUPERVISOR, None)  # processes started here have another parent
    if supervisor is not None:
        threading.Thread(target=_watch, args=(int(supervisor),), name="supervisor", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_WATCH_S)
    command = [sys.executable, "-P", "-m", _THIS, "stop", str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def as_service(name: str, command: Sequence[str], env: Mapping[str, str]) -> Service:
    """The service ``name`` that is a command of another package; it ends with its supervisor."""
    return Service(name, _THIS, ("run", *command), env=env)


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    if command == "stop":
        stop_process(psutil.Process(int(arguments[0])), STOP_S, STOP_APART_S)
    else:
        end_with_supervisor()
        sys.argv = arguments
        (script,) = entry_points(group="console_scripts", name=arguments[0])
        sys.exit(script.load()())
