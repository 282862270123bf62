"""Call a function in a child process that is killed when it uses too much processor time or memory.

A computation in C (a power of large integers, a regular expression) reacts neither to signals nor to cancellation, and
a thread cannot be killed. So rules whose cost depends on model-written text run in a worker process
(``bounded_worker``), which the kernel kills at its limit. Workers are reused, also by later judgings of this process
and from other event loops; they end when this process ends.
"""

import asyncio
import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import rft_platform

MEMORY_MB = 2048  #: address space of each worker
_LEAST_WAIT_S = 60.0  # minimum wait for a worker's start and answer, however loaded the machine is
_WAIT_FACTOR = 10.0  # seconds of wall time for each second of processor time
_ATTEMPTS = 2  # the first worker may have been killed by something else
_CHUNK = 1 << 16
_ROOT = Path(rft_platform.__file__).parents[1]


class LimitExceededError(Exception):
    """The computation was killed: it needed more processor time or memory than allowed."""


async def call_bounded(
    function: Callable[..., Any], *arguments: Any, cpu_s: float, imports: tuple[str, ...] = ()
) -> Any:
    """Return ``function(*arguments)``, computed in a worker process; arguments and result are JSON values.

    ``function`` must be at the top level of a module. ``imports`` names the large modules that it imports: a worker
    loads them before the time of a call starts. Raises LimitExceededError after ``cpu_s`` seconds of processor time, at
    MEMORY_MB, or if the worker dies twice; RuntimeError for an exception of the function, and OSError if no worker
    starts.
    """
    target, died = f"{function.__module__}:{function.__qualname__}", ""
    for _ in range(_ATTEMPTS):
        worker = _WORKERS.take(target, imports)
        try:
            async with asyncio.timeout(max(_LEAST_WAIT_S, _WAIT_FACTOR * cpu_s)):
                answer = await worker.ask([cpu_s, arguments])
        except (TimeoutError, ConnectionError) as error:
            died = worker.end() if isinstance(error, ConnectionError) else f"no answer in time, {worker.end()}"
            if worker.is_out_of_time:
                raise LimitExceededError(f"more than {cpu_s:g} s of processor time") from None
            continue
        except BaseException:
            worker.end()
            raise
        _WORKERS.give_back(target, worker)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        if "exceeded" in answer:
            raise LimitExceededError(answer["exceeded"])
        return answer["value"]
    raise LimitExceededError(f"its process died {_ATTEMPTS} times: {died}")


class _Worker:
    """One child process and the socket to it; one request at a time."""

    def __init__(self, target: str, imports: tuple[str, ...]) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._received = b""
        self._status: int | None = None
        self._started = False
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        command = [
            sys.executable,
            "-P",
            "-m",
            "rft_platform.judging.sandbox.bounded_worker",
            str(MEMORY_MB),
            target,
            *imports,
        ]
        with other:
            self.pid = os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, "PYTHONPATH": path},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, other.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, self._errors.fileno(), 2),
                ],
                setsid=True,  # Ctrl-C on the terminal must not reach the worker
            )

    async def ask(self, request: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises ConnectionError if the process ends instead."""
        if not self._started:
            await self._line()
            self._started = True
        await asyncio.get_running_loop().sock_sendall(self._socket, json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._line())
        return answer

    async def _line(self) -> bytes:
        loop, parts = asyncio.get_running_loop(), [self._received]
        while b"\n" not in parts[-1]:
            data = await loop.sock_recv(self._socket, _CHUNK)
            if not data:
                raise ConnectionResetError("it closed the connection")
            parts.append(data)
        line, _, self._received = b"".join(parts).partition(b"\n")
        return line

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._wait(os.WNOHANG) is None

    @property
    def is_out_of_time(self) -> bool:
        """Whether the kernel killed the process at its processor time limit."""
        return self._status is not None and os.waitstatus_to_exitcode(self._status) == -signal.SIGPROF

    def end(self) -> str:
        """Kill the process if it is running, and return how it ended. Raises OSError if it could not start."""
        with suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)
        self._wait(0)
        self._socket.close()
        with self._errors as stream:
            stream.seek(0)
            lines = stream.read().decode("utf-8", "replace").strip().splitlines()
        if not self._started and self._status is not None and os.WIFEXITED(self._status):
            raise OSError(f"the worker process of a judge does not start: {lines[-1] if lines else 'no message'}")
        code = "unknown" if self._status is None else os.waitstatus_to_exitcode(self._status)
        return f"exit code {code}{f', {lines[-1]}' if lines else ''}"

    def _wait(self, options: int) -> int | None:
        """The exit status; None while the process is running (or if something else has reaped it)."""
        if self._status is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, options)
                self._status = status if pid else None
        return self._status


class _Workers:
    """Idle workers of this process, by the function that they call."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Worker]] = {}
        self._lock = threading.Lock()

    def take(self, target: str, imports: tuple[str, ...]) -> _Worker:
        """Return an idle worker, or a new one."""
        with self._lock:
            idle = self._idle.setdefault(target, [])
            while idle:
                worker = idle.pop()
                if worker.is_alive:
                    return worker
                worker.end()
        return _Worker(target, imports)

    def give_back(self, target: str, worker: _Worker) -> None:
        """Keep a worker for the next call."""
        with self._lock:
            self._idle[target].append(worker)

    def end(self) -> None:
        """End all idle workers."""
        with self._lock:
            for worker in [worker for idle in self._idle.values() for worker in idle]:
                worker.end()
            self._idle.clear()

    def forget(self) -> None:
        """Forget the workers of the parent process, in a forked child."""
        self._idle, self._lock = {}, threading.Lock()


_WORKERS = _Workers()
atexit.register(_WORKERS.end)
os.register_at_fork(after_in_child=_WORKERS.forget)
