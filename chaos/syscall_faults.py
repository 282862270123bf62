"""Inject errno values and signals into file system calls of a child process, by an LD_PRELOAD library.

The library is one C file, compiled on first use. Example: the second rename onto a note fails with EIO::

    library = build_library(tmp_path)                      # None without a C compiler
    fault = SyscallFault("rename", error="EIO", path="/rounds/", nth=2)
    subprocess.run(command, env={**os.environ, **injecting(library, [fault], log=tmp_path / "strikes.txt")})
    assert strikes(tmp_path / "strikes.txt")
"""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

_SOURCE = Path(__file__).with_suffix(".c")

Call: TypeAlias = Literal[
    "rename",
    "fsync",
    "fdatasync",
    "open",
    "read",
    "pread",
    "write",
    "pwrite",
    "unlink",
    "mkdir",
    "ftruncate",
    "flock",
    "fcntl",
]


@dataclass(frozen=True, slots=True)
class SyscallFault:
    """A rule: which calls of which process fail, and how. Exactly one of ``error`` and ``signal`` must be set."""

    call: Call
    error: str = ""  # name of an errno, as in "ENOSPC"
    signal: str = ""  # name of a signal that the process sends itself, as in "SIGKILL"
    after: bool = False  # send the signal after the call instead of before it
    path: str = ""  # only files whose path contains this; for a rename, either path
    process: str = ""  # only processes whose command line contains this
    nth: int = 1  # number of the first matching call to strike, from 1
    times: int = 1  # number of calls to strike; 0: all following calls
    once: Path | None = None  # a file that must not exist: the fault strikes once over all processes

    def __post_init__(self) -> None:
        if bool(self.error) == bool(self.signal):
            raise ValueError(f"fault of {self.call}: expected either an error or a signal")
        for text in (self.path, self.process, str(self.once or "")):
            if any(mark in text for mark in ",;="):
                raise ValueError(f"fault of {self.call}: {text!r} must not contain , ; or =")

    def rule(self) -> str:
        """The rule in the syntax of the library."""
        keys = {
            "call": self.call,
            "error": getattr(errno, self.error) if self.error else "",
            "signal": int(getattr(signal, self.signal)) if self.signal else "",
            "after": int(self.after) or "",
            "path": self.path,
            "process": self.process,
            "nth": self.nth,
            "times": self.times,
            "once": self.once or "",
        }
        return ",".join(f"{key}={value}" for key, value in keys.items() if value != "")


def build_library(folder: Path) -> Path | None:
    """Compile the library into ``folder``; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "syscall_faults.so"
    if not library.exists():
        temp = folder / f"syscall_faults.{os.getpid()}.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(temp), str(_SOURCE)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True, capture_output=True, text=True)
        temp.replace(library)
    return library


def injecting(library: Path, faults: Sequence[SyscallFault], log: Path | None = None) -> dict[str, str]:
    """Environment variables that inject the faults into a process and its children; ``log`` records the strikes."""
    return _environment(library, rules(faults), log)


def injecting_from(library: Path, file: Path, log: Path | None = None) -> dict[str, str]:
    """As ``injecting``, but every process reads the ``rules`` from ``file`` when it starts."""
    return _environment(library, f"@{file}", log)


def rules(faults: Sequence[SyscallFault]) -> str:
    """The faults in the syntax of the library."""
    return ";".join(fault.rule() for fault in faults)


def _environment(library: Path, value: str, log: Path | None) -> dict[str, str]:
    environment = {"LD_PRELOAD": str(library), "RFT_SYSCALL_FAULTS": value}
    return environment if log is None else {**environment, "RFT_SYSCALL_FAULTS_LOG": str(log)}


def strikes(log: Path) -> list[tuple[int, str, str]]:
    """The strikes so far as (pid, call, path), in order."""
    if not log.exists():
        return []
    found = (line.split(" ", 2) for line in log.read_text(encoding="utf-8", errors="replace").splitlines())
    return [(int(pid), call, path) for pid, call, path in found]
