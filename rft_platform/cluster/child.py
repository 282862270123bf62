"""Call functions in a child process, and run programs; both within limits, and ended with all their descendants.

A computation in C (a power of large integers, a regular expression) reacts neither to signals nor to cancellation, and
a thread cannot be killed. A process can be killed: the kernel kills a ``Child`` at its limit of processor time and when
this process ends, also by SIGKILL; this process kills it at its limit of wall time and when a call is cancelled.
"""

import asyncio
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from rft_platform.cluster.confined import descendants
from rft_platform.common.errors import RftError
from rft_platform.common.threads import DaemonThreads

_MAIN = Path(__file__).with_name("child_main.py")
_CHUNK = 1 << 16
_ENDING_S = 5.0  # a process in uninterruptible sleep may need longer: it is not waited for
_TAIL_BYTES, _TAIL_LINES = 8192, 12
_THREADS = DaemonThreads("run-command")
_children: weakref.WeakSet["Child"] = weakref.WeakSet()


class ChildError(RftError):
    """A child process did not start, or it ended before it answered."""

    def __init__(self, message: str, how: str, started: bool = True, tail: str = "") -> None:
        super().__init__(message)
        self.how = how  # a verb phrase: "was killed by SIGKILL"
        self.started = started  # whether it had imported its module
        self.tail = tail  # the last lines of its output


class MachineLostError(ChildError):
    """The process was lost with its machine, or with the process that started it there."""


class KilledError(ChildError):
    """The process was killed by SIGKILL: by a person, or by the kernel when memory ran out."""


class LimitExceededError(ChildError):
    """A call needed more processor time or memory than allowed."""


class AnswerTimeoutError(ChildError):
    """A call was not answered within its wall time, so the process was killed."""


class CallError(RftError):
    """The function of a child raised an exception; ``kind`` is the name of its class, ``text`` its message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


def repeatable_environment() -> dict[str, str]:
    """The environment variables of this process, with a fixed seed of hashes, which decides the order of sets."""
    return {**os.environ, "PYTHONHASHSEED": "0"}


class _Call(NamedTuple):
    function: str
    cpu_s: float | None
    wall_s: float | None
    deadline: float  # monotonic


class Child:
    """A process that calls functions of one module, one call at a time. It ends with this object and this process."""

    def __init__(
        self,
        module: str,
        *,
        imports: Sequence[str] = (),
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        memory_mb: int | None = None,
        log: Path | None = None,
    ) -> None:
        """Start the process and let it import ``module``; this does not wait for it. Raises OSError if it cannot start.

        Args:
            module: the module with the functions to call.
            imports: further modules, which the process imports before the time of a call starts.
            python: another interpreter; it needs only what ``module`` imports, and gets this package from here.
            env: all environment variables; default: those of this process.
            memory_mb: limit of address space, in addition to what the process uses after its imports.
            log: file that its standard output and error are appended to; by default they are kept for error messages.
        """
        ours, theirs = socket.socketpair()
        self._output: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("ab+")  # noqa: SIM115
        self._output_start = os.fstat(self._output.fileno()).st_size
        options = json.dumps({"module": module, "imports": list(imports), "memory_mb": memory_mb})
        command = [python or sys.executable, "-P", str(_MAIN), str(theirs.fileno()), options]
        try:
            # The pipe of standard input carries nothing. It closes when this process ends, which ends the child.
            self._process = _start(
                command, env=env, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        except BaseException:
            ours.close()
            self._output.close()
            raise
        finally:
            theirs.close()
        self._module, self._socket = module, ours
        self._memory_mb, self._started = memory_mb, False
        self._received, self._searched = bytearray(), 0  # bytes without the end of a line
        self._call = _Call("", None, None, 0.0)
        self._end = weakref.finalize(self, _end, self._process, ours, self._output)
        _children.add(self)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Id of the process, of its session and of its group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and belongs to this process, not to one that this process was forked from."""
        return self._end.alive and _exit_code(self._process) is None

    def is_lost_with(self, other: object) -> bool:
        """False: this process would be lost with the machine, too."""
        return False

    def kill(self) -> None:
        """Kill the process at once, with its group and all its descendants."""
        self._end()

    def ask(
        self,
        function: str,
        *arguments: Any,
        cpu_s: float | None = None,
        wall_s: float | None = None,
        on_note: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return ``function(*arguments)``. Arguments and result are JSON values, or bytes that stand for JSON text.

        Args:
            function: name in the child's module.
            cpu_s: seconds of processor time of the call.
            wall_s: seconds until the answer, including the start of the process.
            on_note: is called with each value that the function passes to ``child_main.note``.

        Raises CallError for an exception of the function, LimitExceededError or AnswerTimeoutError at a limit,
        ChildError if the process ends, and TypeError or ValueError for arguments that are not JSON values. Unless the
        function returned, raised an exception or reached the limit of memory, the process has been killed.
        """
        self.send(function, *arguments, cpu_s=cpu_s, wall_s=wall_s)
        return self.answer(on_note)

    def send(self, function: str, *arguments: Any, cpu_s: float | None = None, wall_s: float | None = None) -> None:
        """Begin a call as ``ask`` does. Its time of ``wall_s`` starts; ``answer`` reports whatever goes wrong."""
        line = self._begin(function, arguments, cpu_s, wall_s)
        with self._killing_on_failure(), suppress(ConnectionError, TimeoutError):
            self._socket.settimeout(wall_s)
            self._socket.sendall(line)

    def answer(self, on_note: Callable[[Any], None] | None = None) -> Any:
        """Wait for the result of the call that ``send`` began."""
        with self._killing_on_failure():
            while (message := self._next_answer(on_note)) is None:
                if (left := self._call.deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._socket.settimeout(None if left == float("inf") else left)
                self._take(self._socket.recv(_CHUNK))
        return self._result(message)

    async def ask_async(
        self,
        function: str,
        *arguments: Any,
        cpu_s: float | None = None,
        wall_s: float | None = None,
        on_note: Callable[[Any], None] | None = None,
    ) -> Any:
        """``ask`` in any event loop; a call that is cancelled kills the process."""
        line, loop = self._begin(function, arguments, cpu_s, wall_s), asyncio.get_running_loop()
        if self._socket.gettimeout() != 0:  # saves a system call
            self._socket.setblocking(False)
        with self._killing_on_failure():
            async with asyncio.timeout(wall_s):
                with suppress(ConnectionError):  # the next line reports the end
                    await loop.sock_sendall(self._socket, line)
                while (message := self._next_answer(on_note)) is None:
                    self._take(await loop.sock_recv(self._socket, _CHUNK))
        return self._result(message)

    def _begin(self, function: str, arguments: Sequence[Any], cpu_s: float | None, wall_s: float | None) -> bytes:
        if not self._end.alive:
            raise ChildError(f"the process of {self._module} was ended, or another process started it", "was ended")
        deadline = float("inf") if wall_s is None else time.monotonic() + wall_s
        self._call = _Call(function, cpu_s, wall_s, deadline)
        if not any(isinstance(each, bytes) for each in arguments):
            return json.dumps([function, cpu_s, arguments]).encode() + b"\n"
        encoded = b",".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in arguments)
        return json.dumps([function, cpu_s]).encode()[:-1] + b", [%s]]\n" % encoded

    @contextmanager
    def _killing_on_failure(self) -> Iterator[None]:
        """Kill the process if the block fails, because its answer would be taken for that of the next call."""
        try:
            yield
        except ConnectionError:
            code = _wait(self._process, _ENDING_S)
            if code == -signal.SIGPROF:
                how = f"needed more than {self._call.cpu_s:g} s of processor time"
                raise self._failure(how, LimitExceededError) from None
            kind = KilledError if code == -signal.SIGKILL else ChildError
            raise self._failure(_described(code), kind) from None
        except TimeoutError:
            raise self._failure(f"did not answer within {self._call.wall_s:g} s", AnswerTimeoutError) from None
        except BaseException:
            self.kill()
            raise

    def _failure(self, how: str, kind: type[ChildError] = ChildError) -> ChildError:
        """Kill the process; return the error that says how it ended and what it printed last."""
        lines = self._last_lines()
        self.kill()
        what = (
            f"{self._call.function} in the process of {self._module}"
            if self._started
            else f"the start of {self._module}"
        )
        printed = f"; it printed: {lines[-1].strip()}" if lines else ""
        return kind(f"{what}: it {how}{printed}", how, self._started, "\n".join(lines))

    def _last_lines(self) -> list[str]:
        if self._output.closed:
            return []
        number = self._output.fileno()  # not by the stream: the process may write at the offset that they share
        start = max(self._output_start, os.fstat(number).st_size - _TAIL_BYTES)
        return os.pread(number, _TAIL_BYTES, start).decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError
        self._received += data

    def _next_answer(self, on_note: Callable[[Any], None] | None) -> dict[str, Any] | None:
        """The next received answer; None if it is not complete. Notes before it are passed on."""
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            line = self._received[:end]
            del self._received[: end + 1]
            self._searched = 0
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise self._failure("sent a message that is no JSON object")
            if "ready" in message:
                self._started = True
            elif "note" not in message:
                return message
            elif on_note is not None:
                on_note(message["note"])
        self._searched = len(self._received)
        return None

    def _result(self, message: dict[str, Any]) -> Any:
        if "value" in message:
            return message["value"]
        if "memory" in message:
            how = f"needed more than {self._memory_mb} MB of memory"
            raise LimitExceededError(f"{self._call.function} in the process of {self._module}: it {how}", how)
        raise CallError(*message["error"])

    def _forget(self) -> None:
        """Close this process's copies of a child of the process that it was forked from."""
        if self._end.detach():
            for stream in (self._process.stdin, self._socket, self._output):
                if stream is not None:
                    stream.close()
            self._process.returncode = 0  # it is no child of this process


def _forget_children() -> None:
    for child in list(_children):
        child._forget()


os.register_at_fork(after_in_child=_forget_children)


@dataclass(frozen=True, slots=True)
class Output:
    """How a program ended, and what it wrote."""

    exit_code: int  # negative: the signal that killed it
    stdout: bytes
    stderr: bytes
    timed_out: bool
    too_long: bool  # it wrote more than it may, and was killed

    @property
    def ok(self) -> bool:
        """Whether the program ended with exit code 0, within its limits."""
        return self.exit_code == 0 and not self.timed_out and not self.too_long


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run. When a run returns, the program has ended with its group and its descendants.

    A run raises OSError if the program cannot be started. A cancelled ``run_async`` kills it.
    """

    command: Sequence[str]
    wall_s: float
    stdin: bytes = b""
    output_bytes: int = 16 << 20  # most bytes of standard output, and of standard error
    env: Mapping[str, str] | None = None  # all environment variables; None: those of this process
    cwd: Path | None = None
    pass_fds: Sequence[int] = ()  # for the program only: they are closed here as soon as it has been started

    def run(self) -> Output:
        """Run the program and wait for its end."""
        return self._converse(self._start())

    async def run_async(self) -> Output:
        """``run`` in a new thread."""
        process = self._start()
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(_THREADS, self._converse, process))
        except asyncio.CancelledError:
            _kill(process)  # the thread then reads the end of the streams
            raise

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            return _start(
                self.command, env=self.env, cwd=self.cwd, pass_fds=self.pass_fds,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        finally:
            for number in self.pass_fds:
                os.close(number)

    def _converse(self, process: "subprocess.Popen[bytes]") -> Output:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        deadline = time.monotonic() + self.wall_s
        streams: tuple[IO[bytes], ...] = (process.stdin, process.stdout, process.stderr)
        written, received = 0, [bytearray() for _ in streams]
        try:
            with selectors.DefaultSelector() as selector:
                for number, stream in enumerate(streams):
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, selectors.EVENT_READ if number else selectors.EVENT_WRITE, number)
                while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(left):
                        if key.data == 0:
                            written += _write(key.fd, self.stdin[written : written + _CHUNK])
                            is_complete = written >= len(self.stdin)
                        else:
                            data = os.read(key.fd, _CHUNK)
                            received[key.data] += data
                            is_complete = not data
                        if is_complete:
                            selector.unregister(streams[key.data])
                            streams[key.data].close()
                    if any(len(part) > self.output_bytes for part in received):
                        break
            too_long = any(len(part) > self.output_bytes for part in received)
            code = None if too_long else _wait(process, deadline - time.monotonic())
        finally:
            _kill(process)
            for stream in streams:
                stream.close()
        _, stdout, stderr = (bytes(part[: self.output_bytes]) for part in received)
        timed_out = code is None and not too_long
        return Output(process.returncode if code is None else code, stdout, stderr, timed_out, too_long)


def _write(number: int, data: bytes) -> int:
    """Write to a pipe; the number of bytes, or of all if the program has closed the pipe."""
    try:
        return os.write(number, data)
    except BrokenPipeError:
        return sys.maxsize


def _start(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, so that a Ctrl-C on the terminal does not reach it."""
    return subprocess.Popen(command, start_new_session=True, **options)


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit code of an ended process, None while it runs. The process is not reaped, so no other gets its id."""
    if process.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):  # something else has reaped it
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return process.poll()


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code of a process that is about to end; None after ``seconds``."""
    deadline, pause_s = time.monotonic() + seconds, 0.0005
    while (code := _exit_code(process)) is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, 0.05)
    return code


def _described(exit_code: int | None) -> str:
    """A verb phrase that says how a process ended."""
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    hint = " (the kernel does this when memory runs out)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, its group and its descendants, and reap it; nothing if it was reaped before."""
    if process.returncode is not None:
        return
    family = [] if _exit_code(process) is not None else descendants(process.pid)  # also those in other sessions
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket, output: IO[bytes]) -> None:
    _kill(process)
    for stream in (process.stdin, connection, output):
        if stream is not None:
            stream.close()
