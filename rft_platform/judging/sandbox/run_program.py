"""Run a Python program or a shell command in a sandbox: limits, an empty environment, its own folder, a certain end.

The environment variable ``RFT_SANDBOX`` may name a command that runs another command in an outer sandbox, such as
``bwrap`` with its options. It is put before the command of each program.
"""

import asyncio
import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rft_platform.cluster import confined
from rft_platform.cluster.child import Program
from rft_platform.common.errors import UserError

SANDBOX = "RFT_SANDBOX"
_ENTRY = Path(confined.__file__)
_PROGRAM_RPC = Path(__file__).with_name("program_rpc.py")
_MEGABYTE = 1 << 20


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


#: What a shell may use: it starts further processes. The kernel counts those of the user outside the sandbox, too.
SHELL_LIMITS = Limits(wall_s=60.0, cpu_s=60, memory_mb=2048, file_mb=64, processes=4096, open_files=256)
_SHELL = 'import os, sys; os.execvp("bash", ["bash", "-c", sys.argv[1]])'


async def run_command(
    command: str, folder: Path, limits: Limits = SHELL_LIMITS, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Run a command of ``bash`` in the sandbox, with ``folder`` as its working folder, which stays.

    It finds the programs of this interpreter's environment and of the system, and the variables ``environment``. All
    processes that it started have ended when this returns. Raises the errors of ``run_program``.
    """
    places = (str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")
    outer = await _outer_sandbox()
    with _StartSignal() as start:
        outcome = await _run_in(
            folder,
            outer,
            ["-c", _SHELL, command],
            b"",
            limits,
            start,
            (),
            {"PATH": ":".join(places), **(environment or {})},
        )
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
        longer = replace(limits, wall_s=limits.wall_s + 1.0)  # the time of the tests ends first, and says so
        program = asyncio.create_task(_run(outer, source, "", longer, program_start, ("program", asked, answers)))
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
    """Pipes to the entry in the sandbox. The program has no access to them.

    On one, the entry reports that it runs. The other closes when this process ends, which ends the entry.
    """

    def __enter__(self) -> "_StartSignal":
        (self._reading, writing), (lifeline, self._lifeline) = os.pipe(), os.pipe()
        self.of_entry = (writing, lifeline)  # the started program closes them here
        os.set_blocking(self._reading, False)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self._lifeline)

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

    ``part``: the role and pipe ends of one of two communicating processes.
    """
    folder = Path(tempfile.mkdtemp(prefix="rft-sandbox-"))
    try:
        program = folder / "program.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        arguments = [*((str(_PROGRAM_RPC), *map(str, part)) if part else ()), str(program)]
        return await _run_in(
            folder, outer, arguments, stdin.encode("utf-8", "replace"), limits, start, part[1:] if part else (), {}
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run_in(
    folder: Path,
    outer: list[str],
    arguments: list[str],
    stdin: bytes,
    limits: Limits,
    start: _StartSignal,
    ends: tuple[int, ...],
    further: Mapping[str, str],
) -> Outcome:
    """Run Python with ``arguments`` in ``folder``. ``ends``: pipe ends for it; ``further``: variables for it."""
    command = [
        *(word.replace("{folder}", str(folder)) for word in outer),
        *(sys.executable, "-I", "-S", "-B", str(_ENTRY), *map(str, start.of_entry)),
        json.dumps(limits.as_resource_limits()),
        *arguments,
    ]
    environment = {"HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = Program(
        command, wall_s=limits.wall_s, stdin=stdin, output_bytes=limits.output_bytes,
        env={**environment, **further}, cwd=folder, pass_fds=(*start.of_entry, *ends),
    )  # fmt: skip
    ended = await running.run_async()
    stdout, stderr = (part.decode("utf-8", "replace") for part in (ended.stdout, ended.stderr))
    return Outcome(ended.exit_code, stdout, stderr, ended.timed_out, ended.too_long)
