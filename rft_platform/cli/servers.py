"""Servers that live as long as the command: started together, watched, and stopped without leaving anything behind."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rft_platform.errors import RftError, UserError
from rft_platform.processes.spawn import stop_process

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Server:
    """One server; without a command it runs elsewhere and is only named."""

    name: str
    command: list[str]
    env: Mapping[str, str]
    is_ready: Callable[[], bool]
    url: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Child:
    """A server that was started here, in a session of its own: a Ctrl-C of the terminal does not reach it."""

    server: Server
    process: subprocess.Popen[bytes]
    created: float
    log: Path

    def check(self) -> None:
        """Raise RftError with the end of its log if the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise RftError(f"{self.server.name} ended with exit code {code}; the end of {self.log}:\n{_tail(self.log)}")


def check_ports(servers: Sequence[Server]) -> None:
    """Raise UserError for a port that is taken, or wanted twice."""
    ports = [server.port for server in servers if server.port is not None]
    for server in servers:
        if server.port is None:
            continue
        if ports.count(server.port) > 1:
            raise UserError(f"port {server.port} is given twice: choose another with --port or --mlflow-port")
        if not port_is_free(server.port):
            option = "--port" if server.name == "Dagster" else "--mlflow-port"
            raise UserError(
                f"port {server.port} is taken: free it, or choose another one for {server.name} with {option}"
            )


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def serving(servers: Sequence[Server], logs: Path) -> Iterator[list[Child]]:
    """Start the servers and wait until each is ready; however the block ends, all of them are stopped.

    Raises RftError with the end of its log when a server ends, or is not ready in time.
    """
    children: list[Child] = []
    try:
        for server in servers:
            if server.command:
                children.append(_start(server, logs))  # noqa: PERF401  what has started is stopped if the next fails
        _wait_until_ready(children)
        yield children
    finally:
        _stop(children)


def wait_for_end(children: Sequence[Child]) -> None:
    """Watch until one of them ends, and raise RftError then; Ctrl-C is the way out."""
    while True:
        for child in children:
            child.check()
        time.sleep(_POLL_S)


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


def _wait_until_ready(children: Sequence[Child]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    waiting = list(children)
    while waiting:
        for child in children:
            child.check()
        waiting = [child for child in waiting if not child.server.is_ready()]
        if waiting and time.monotonic() > deadline:
            name, log = waiting[0].server.name, waiting[0].log
            raise RftError(f"{name} was not ready after {_START_TIMEOUT_S:.0f} s; the end of {log}:\n{_tail(log)}")
        if waiting:
            time.sleep(_POLL_S)


def _stop(children: Sequence[Child]) -> None:
    """Stop all at once, each with everything that it started."""
    if not children:
        return
    with ThreadPoolExecutor(len(children)) as pool:
        list(pool.map(lambda child: stop_process(child.process.pid, child.created, _STOP_TIMEOUT_S), children))
    for child in children:
        child.process.wait()
        with suppress(ProcessLookupError):  # what a server that was killed has left behind in its group
            os.killpg(child.process.pid, signal.SIGKILL)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join(f"  {line}" for line in lines)
