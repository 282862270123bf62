"""Run a Python program in a sandbox: limits, an empty environment, its own folder, and guaranteed termination.

The environment variable ``RFT_SANDBOX`` may name a command that runs another command in an outer sandbox, such as
``bwrap`` with its options. It is put before the command of each program.
"""

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from rft_platform.common.errors import UserError

SANDBOX = "RFT_SANDBOX"
_ENTRY = Path(__file__).with_name("entry.py")
_PROGRAM_RPC = Path(__file__).with_name("program_rpc.py")
_MEGABYTE = 1 << 20
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use. The limits protect against accidents, not against attackers."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 512  # address space
    file_mb: int = 16  # size of one file
    processes: int = 0  # further processes and threads; the kernel does not enforce this limit for root
    open_files: int = 64
    output_bytes: int = 1 << 20

    def as_resource_limits(self) -> dict[str, int]:
        """The kernel's limits by name, without ``RLIMIT_``."""
        return {
            "CPU": self.cpu_s,
            "AS": self.memory_mb * _MEGABYTE,
            "FSIZE": self.file_mb * _MEGABYTE,
            "NPROC": self.processes,
            "NOFILE": self.open_files,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool = False
    output_exceeded: bool = False

    @property
    def ok(self) -> bool:
        """Whether the program ended with exit code 0, within its time and output limits."""
        return self.returncode == 0 and not self.timed_out and not self.output_exceeded


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run Python ``source`` in a sandboxed process. All processes that it started have ended when this returns.

    Raises UserError if ``RFT_SANDBOX`` is set and no program runs behind its command, OSError if the process ends
    before it runs the program.
    """
    outer = await _outer_sandbox()
    with _StartSignal() as start:
        outcome = await _run(outer, source, stdin, limits or Limits(), start)
        _check_started(outcome, start)
    return outcome


async def run_tested(source: str, tests: str, limits: Limits | None = None) -> Outcome:
    """Run ``tests`` against the program ``source``, each in its own sandboxed process; return the outcome of the tests.

    Only the tests' process decides: it must end with exit code 0 and print, as the last line, a random word that only
    this process received. Raises the errors of ``run_program``.
    """
    return await _run_tested(await _outer_sandbox(), source, tests, limits or Limits())


_usable: set[str] = set()  # values of RFT_SANDBOX behind which a program has run


async def _outer_sandbox() -> list[str]:
    """The words of ``RFT_SANDBOX``. A program runs behind a new command first: its failure must not become a reward."""
    command = os.environ.get(SANDBOX, "").strip()
    try:
        words = shlex.split(command)
        if words:
            words[0] = shutil.which(words[0]) or words[0]
        if words and command not in _usable:
            outcome = await _run_tested(words, "n = open('file', 'w').write('x')", "assert n == 1", Limits(wall_s=60.0))
            if not outcome.ok:
                raise ValueError(_last_line(outcome))
            _usable.add(command)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{SANDBOX}={command}: a Python program that writes a file in its temporary folder does not run behind "
            f"this command ({error}). Correct the command (docs/judges.md shows one) or unset the variable."
        ) from error
    return words


async def _run_tested(outer: list[str], source: str, tests: str, limits: Limits) -> Outcome:
    word = secrets.token_hex(16)
    with _StartSignal() as program_start, _StartSignal() as tests_start:
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        program = asyncio.create_task(_run(outer, source, "", limits, program_start, ("program", asked, answers)))
        judging = asyncio.create_task(
            _run(outer, "", f"{word}\n{tests}", limits, tests_start, ("tests", answered, asks))
        )
        try:
            outcome = await judging
        finally:
            program.cancel()
            judging.cancel()
            await asyncio.gather(program, judging, return_exceptions=True)
        _check_started(outcome, program_start, tests_start)
    passed = outcome.ok and outcome.stdout.rstrip().endswith(word)
    return outcome if passed or not outcome.ok else replace(outcome, returncode=1)


class _StartSignal:
    """A pipe on which the entry in the sandbox reports that it runs. The program has no access to it."""

    def __enter__(self) -> "_StartSignal":
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self.writing)

    def received(self) -> bool:
        """Whether the entry has reported."""
        try:
            return bool(os.read(self._reading, 1))
        except BlockingIOError:
            return False


def _check_started(outcome: Outcome, *starts: _StartSignal) -> None:
    if not all(start.received() for start in starts) and not outcome.timed_out:
        raise OSError(f"the sandbox of a program did not start: {_last_line(outcome)}")


def _last_line(outcome: Outcome) -> str:
    return outcome.stderr.strip().rpartition("\n")[2] or f"exit code {outcome.returncode}"


async def _run(
    outer: list[str],
    source: str,
    stdin: str,
    limits: Limits,
    start: _StartSignal,
    part: tuple[str, int, int] | None = None,
) -> Outcome:
    """``outer``: words before the command.

    ``part``: the role and pipe ends of one of two communicating processes; the ends are closed here.
    """
    folder = Path(tempfile.mkdtemp(prefix="rft-sandbox-"))
    try:
        program = folder / "program.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        try:
            process = await asyncio.create_subprocess_exec(
                *(word.replace("{folder}", str(folder)) for word in outer),
                sys.executable,
                *("-I", "-S", "-B", str(_ENTRY), str(start.writing), json.dumps(limits.as_resource_limits())),
                *((str(_PROGRAM_RPC), *map(str, part)) if part else ()),
                str(program),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env={"HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(start.writing, *(part[1:] if part else ())),
                start_new_session=True,
            )
        finally:
            for end in part[1:] if part else ():
                os.close(end)
        try:
            return await _conversation(process, stdin, limits)
        finally:
            await _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _conversation(process: asyncio.subprocess.Process, stdin: str, limits: Limits) -> Outcome:
    kept: list[bytearray] = [bytearray(), bytearray()]
    exceeded = asyncio.Event()

    async def read(stream: asyncio.StreamReader | None, into: bytearray) -> None:
        while stream is not None and (data := await stream.read(_CHUNK)):
            into += data
            if len(into) > limits.output_bytes:
                del into[limits.output_bytes :]
                exceeded.set()
                _kill(process)
                return

    jobs = asyncio.gather(
        _feed(process, stdin), read(process.stdout, kept[0]), read(process.stderr, kept[1]), process.wait()
    )
    timed_out = False
    try:
        await asyncio.wait_for(jobs, limits.wall_s)
    except TimeoutError:
        timed_out = True
    except asyncio.CancelledError:
        with suppress(asyncio.CancelledError):
            await jobs  # else asyncio reports that the result was never retrieved
        raise
    await _end(process)
    stdout, stderr = (bytes(part).decode("utf-8", "replace") for part in kept)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return Outcome(code, stdout, stderr, timed_out, exceeded.is_set())


async def _feed(process: asyncio.subprocess.Process, stdin: str) -> None:
    if process.stdin is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # the program did not read all of its input
        process.stdin.write(stdin.encode("utf-8", "replace"))
        await process.stdin.drain()
    process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process, the rest of its process group (even if the process has ended) and its descendants; reap it."""
    _kill(process)
    await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    family: list[psutil.Process] = []
    if process.returncode is None:  # an ended process has ended its descendants, and its id may be reused
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)  # also those in other sessions
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.Error):
            member.kill()
