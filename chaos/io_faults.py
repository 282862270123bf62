"""File system faults of a campaign: planned by a seed, injected at the start of processes, counted when they occur.

`rft run` gets some faults at each start. Under the daemon, a file holds the faults in force; every process reads it at
its start, so that new run workers get new faults. The daemon is restarted when the file holds a fault for it.
"""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaos.records import Injection
from chaos.schedule import Kill, Mode
from chaos.syscall_faults import Call, SyscallFault, build_library, injecting, injecting_from, rules
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_text

_FIRST_NUMBER = 1001  # above all numbers of kills
_AT_ONCE = 6  # faults per start of the driver
_STARTS = 8  # starts of the driver, or turns of the rules file, with a fault before it counts as missed
_IN_FILE = 3  # faults in the rules file at once
#: Calls of each target with the highest call number to strike; only paths in the project's home match.
_CALLS: dict[str, tuple[tuple[Call, int], ...]] = {
    "driver": (
        ("rename", 30), ("fsync", 60), ("fdatasync", 120), ("write", 60), ("pwrite", 400), ("unlink", 60),
        ("mkdir", 12), ("ftruncate", 20), ("flock", 60),
    ),
    "trainer": (("rename", 8), ("fsync", 16), ("write", 30), ("mkdir", 4)),
    "run_worker": (
        ("rename", 10), ("fsync", 20), ("fdatasync", 40), ("write", 30), ("pwrite", 120), ("unlink", 20), ("mkdir", 4),
        ("ftruncate", 6), ("flock", 20),
    ),
    "daemon": (("fdatasync", 60), ("pwrite", 200), ("write", 20), ("flock", 20), ("rename", 4)),
}  # fmt: skip
_PROCESS = {
    "driver": "rft_platform run",
    "trainer": "rft_platform.training.service.worker",
    "run_worker": "--multiprocessing-fork",
    "daemon": "dagster-daemon run",
}
#: The process that most faults of a mode strike, and the others with their share.
_MAIN: dict[Mode, str] = {"driver": "driver", "daemon": "run_worker"}
_SHARES: dict[Mode, tuple[tuple[str, float], ...]] = {
    "driver": (("trainer", 0.3),),
    "daemon": (("trainer", 0.2), ("daemon", 0.25)),
}
_ERRORS = ("EIO", "ENOSPC", "EXDEV", "ESTALE")
_SIGNALS = ("SIGKILL", "SIGKILL", "SIGINT", "SIGTERM")


@dataclass(slots=True)
class IoFaults:
    """The faults of one project. A fault that has occurred leaves its file in ``folder``."""

    folder: Path
    home: Path
    waiting: list[SyscallFault]
    mode: Mode = "driver"
    _active: list[SyscallFault] = field(default_factory=list)
    _starts: dict[Path, int] = field(default_factory=dict)
    done: list[SyscallFault] = field(default_factory=list)
    missed: list[SyscallFault] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """Environment variables with the faults of the driver's next start; empty if no fault is left."""
        self.settle()
        self._active, self.waiting = self.waiting[:_AT_ONCE], self.waiting[_AT_ONCE:]
        if not self._active:
            return {}
        return injecting(self._library(), self._active, self.folder / "strikes.txt")

    def environment_with_file(self) -> dict[str, str]:
        """Environment variables of long-running servers, with the faults that `turn_file` puts in force."""
        self._write_file()
        return injecting_from(self._library(), self._rules, self.folder / "strikes.txt")

    def turn_file(self) -> None:
        """Put the next faults in force for every process that starts from here on."""
        self.settle()
        self._active, self.waiting = self.waiting[:_IN_FILE], self.waiting[_IN_FILE:]
        self._write_file()

    def awaits(self, target: str) -> bool:
        """Whether a fault in force for processes of ``target`` has not occurred yet."""
        return any(_target(fault) == target and not (fault.once and fault.once.exists()) for fault in self._active)

    @property
    def _rules(self) -> Path:
        return self.folder / f"{self.home.name}.rules"

    def _write_file(self) -> None:
        write_text(self._rules, rules(self._active))

    def _library(self) -> Path:
        library = build_library(self.folder)
        if library is None:
            raise RftError("faults in file system calls need a C compiler: install gcc, or leave out --io-faults")
        return library

    def settle(self) -> list[SyscallFault]:
        """Count the faults of the last start that have occurred, and reschedule the others; returns the former."""
        done = [fault for fault in self._active if fault.once is not None and fault.once.exists()]
        self.done += done
        for fault in self._active:
            if fault in done or fault.once is None:
                continue
            self._starts[fault.once] = self._starts.get(fault.once, 0) + 1
            again = self._starts[fault.once] < _STARTS
            (self.waiting if again else self.missed).append(replace(fault, nth=max(1, fault.nth // 2)))
        self._active = []
        return done

    def left(self) -> int:
        """Number of faults that have neither occurred nor been missed."""
        active = sum(fault.once is None or not fault.once.exists() for fault in self._active)
        return len(self.waiting) + active

    def records(self) -> list[Injection]:
        """The faults as records of the campaign's report."""
        self.settle()
        return [
            Injection(
                Kill(_FIRST_NUMBER + number, _target(fault), "any", 0.0, "fault", hurry=True),
                mode=self.mode,
                victim=f"{fault.call} {fault.nth}: {fault.error or fault.signal}{' (after)' if fault.after else ''}",
                round=-1,
                phase="any",
                on_time=True,
                at=0.0,
                hit=fault in self.done,
            )
            for number, fault in enumerate([*self.done, *self.missed, *self.waiting])
        ]


def plan_io_faults(seed: int, count: int, folder: Path, home: Path, mode: Mode = "driver") -> IoFaults:
    """Plan ``count`` faults for the project in ``home``. Equal arguments give equal faults."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"io/{seed}/{home.name}")
    faults = []
    for number in range(count):
        target = _choose_target(generator.random(), mode)
        call, latest = generator.choice(_CALLS[target])
        kill = generator.random() < 0.5
        error = "" if kill else "ENOLCK" if call == "flock" else generator.choice(_ERRORS)
        faults.append(
            SyscallFault(
                call,
                error=error,
                signal=generator.choice(_SIGNALS) if kill else "",
                after=kill and generator.random() < 0.5,
                path=f"{home}/",
                process=_PROCESS[target],
                nth=generator.randint(1, latest),
                once=folder / f"{home.name}-{number:04d}",
            )
        )
    return IoFaults(folder, home, faults, mode)


def _choose_target(drawn: float, mode: Mode) -> str:
    for target, share in _SHARES[mode]:
        if drawn < share:
            return target
        drawn -= share
    return _MAIN[mode]


def _target(fault: SyscallFault) -> str:
    return next(target for target, process in _PROCESS.items() if process == fault.process)
