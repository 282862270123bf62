"""Kill the online service and what collects its rows at seeded moments, break its database, and check what is left.

Every moment is one of: SIGKILL of the service, of the collecting process, or of the engine; a jump of the clock; the
database's files moved away, locked, or failing (ENOSPC, EIO, EROFS by the library of ``syscall_faults``).
"""

import asyncio
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from chaos.online import echo_service
from chaos.online.checks import check
from chaos.online.collector import project_of
from chaos.online.customers import Customers
from chaos.online.forks import Forks
from chaos.syscall_faults import SyscallFault, build_library, injecting, strikes
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_text
from tests.support.ports import free_port

CUSTOMERS = 6
_READY_S = 60.0
_DAY_S = 86_400.0
_FAULTS = (
    SyscallFault("pwrite", error="ENOSPC", path="traffic.db", nth=150, times=60),
    SyscallFault("pwrite", error="EROFS", path="traffic.db", nth=150, times=60),
    SyscallFault("fdatasync", error="EIO", path="traffic.db", nth=20, times=4),
    SyscallFault("write", error="ENOSPC", path="/rounds/", nth=1, times=2),
    SyscallFault("rename", error="ENOSPC", path="/rounds/", nth=1, times=1),
)  # fmt: skip
MOST_FAULTS = len(_FAULTS)
_FAULT_S = 4.0  # that a service with a failing database runs
_KINDS = {"service": 0.62, "collector": 0.14, "both": 0.08, "engine": 0.06, "moved": 0.05, "locked": 0.05}


@dataclass
class Campaign:
    """One project, its service, and what happened to it."""

    folder: Path
    model: Path
    seed: int
    log: Callable[[str], None] = lambda line: None
    moments: Counter[str] = field(default_factory=Counter)
    struck: int = 0  # failing system calls
    _pids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port, self.engine_port = free_port(), free_port()
        self.home, self.clock = self.folder / "home", self.folder / "clock"
        (self.home / "online").mkdir(parents=True)
        write_text(self.clock, "0")
        self.database = self.home / "online" / "traffic.db"
        self.customers = Customers(f"http://127.0.0.1:{self.port}", CUSTOMERS, self.seed)

    def run(self, moments: int, faults: int) -> dict[str, Any]:
        """Go through the moments, then the failing calls; returns the report."""
        began = time.perf_counter()
        with ExitStack() as stack:
            self._start_engine()
            stack.callback(self._end_all)
            asyncio.run(self._run(moments, faults, stack))
        project = project_of(self.home, self.model)
        found = check(project, self.database, self.customers.diary)
        diary = self.customers.diary
        return {
            "seed": self.seed,
            "moments": dict(self.moments),
            "failing_calls": self.struck,
            "wall_s": round(time.perf_counter() - began, 1),
            "answers": dict(sorted(diary.statuses.items())),
            "cut_by_kills": diary.cut,
            **found.to_json(),
        }

    async def _run(self, moments: int, faults: int, stack: ExitStack) -> None:
        generator = random.Random(self.seed)
        forks = Forks({})
        stack.callback(forks.close)
        await self._serve(forks)
        living = asyncio.create_task(self.customers.live())
        for number in range(moments):
            await self._moment(forks, generator, number)
        self._kill("service")
        for fault in _FAULTS[:faults]:
            await self._fail(fault)
        await self._serve(forks)
        self.customers.stop()
        await living
        await self._commit_and_collect(forks)

    async def _moment(self, forks: Forks, generator: random.Random, number: int) -> None:
        kind = generator.choices(list(_KINDS), list(_KINDS.values()))[0]
        if generator.random() < 0.15:
            write_text(self.clock, str(generator.choice((-_DAY_S, 0.0, _DAY_S, -3600.0))))
            self.moments["clock jump"] += 1
        if kind in ("collector", "both") or number % 5 == 4:
            self._pids["collector"] = forks.start("collect", [str(self.home), str(self.model)])
        await asyncio.sleep(generator.uniform(0.02, 0.8))
        self.moments[kind] += 1
        if kind == "moved":
            await self._move_away(generator.uniform(0.2, 1.0))
        elif kind == "locked":
            await self._lock(generator.uniform(0.2, 1.5))
        for victim in {"both": ("service", "collector")}.get(kind, (kind,)):
            self._kill(victim)
        if kind == "engine":
            self._start_engine()
        elif kind in ("service", "both"):
            await self._serve(forks, killed_at=generator.uniform(0, 0.3) if generator.random() < 0.1 else None)
        if number % 20 == 19:
            self.log(f"{number + 1} moments, {len(self.customers.diary.acknowledged)} ratings acknowledged")

    async def _serve(self, forks: Forks, killed_at: float | None = None) -> None:
        """Start the service and wait until it listens; ``killed_at``: kill it first so long after a start."""
        given = echo_service.arguments(self.port, f"sqlite:///{self.database}", self.engine_port, self.clock)
        if killed_at is not None:
            self._pids["service"] = forks.start("serve", given)
            await asyncio.sleep(killed_at)
            self.moments["service that starts"] += 1
            self._kill("service")
        self._pids["service"] = forks.start("serve", given)
        await self._until(lambda: _listens(self.port), "the service listens")

    async def _fail(self, fault: SyscallFault) -> None:
        """Run a service and a collector whose system calls fail for a while."""
        library, strike_log = build_library(self.folder), self.folder / "strikes.txt"
        if library is None:
            raise RftError("failing system calls need a C compiler: install gcc, or say --faults 0")
        before = len(strikes(strike_log))
        forks = Forks(injecting(library, [fault], strike_log))
        await self._serve(forks)
        self._pids["collector"] = forks.start("collect", [str(self.home), str(self.model)])
        await asyncio.sleep(_FAULT_S)
        struck = len(strikes(strike_log)) - before
        self.moments[f"{fault.call} {fault.error} {fault.path}"] = struck
        self.struck += struck
        self.log(f"{fault.call} {fault.error} on {fault.path}: {struck} calls failed")
        self._kill("service")
        self._kill("collector")
        forks.close()

    async def _move_away(self, seconds: float) -> None:
        """Move the files of the database away, and back after some time."""
        files = [Path(f"{self.database}{ending}") for ending in ("", "-wal", "-shm")]
        for file in files:
            with suppress(FileNotFoundError):
                file.rename(file.with_name(f"away-{file.name}"))
        await asyncio.sleep(seconds)
        for file in reversed(files):
            with suppress(FileNotFoundError):
                file.with_name(f"away-{file.name}").rename(file)

    async def _lock(self, seconds: float) -> None:
        """Hold the database's write lock."""
        with (
            closing(sqlite3.connect(self.database, isolation_level=None, timeout=30)) as connection,
            suppress(sqlite3.OperationalError),
        ):
            connection.execute("BEGIN IMMEDIATE").close()
            await asyncio.sleep(seconds)
            connection.execute("ROLLBACK").close()

    async def _commit_and_collect(self, forks: Forks) -> None:
        """At the end commit what is labelled, and collect everything that is committed."""
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{self.port}/commit", json={}) as answer,
        ):
            answer.raise_for_status()
        pid = forks.start("collect", [str(self.home), str(self.model)])
        await self._until(lambda: not psutil.pid_exists(pid), "the rows are collected")

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _READY_S
        while not holds():
            if time.monotonic() > end:
                raise RftError(f"{what}: not after {_READY_S:.0f} s")
            await asyncio.sleep(0.02)

    def _start_engine(self) -> None:
        command = [sys.executable, "-m", "chaos.online.echo_engine", str(self.engine_port)]
        self._engine = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        self._pids["engine"] = self._engine.pid
        while not _listens(self.engine_port):
            if self._engine.poll() is not None:
                raise RftError("the engine has ended")
            time.sleep(0.02)

    def _kill(self, victim: str) -> None:
        pid = self._pids.pop(victim, None)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if victim == "engine":
            self.customers.diary.engine_kills.append(time.monotonic())
            self._engine.wait()
        while psutil.pid_exists(pid):
            time.sleep(0.005)

    def _end_all(self) -> None:
        for victim in list(self._pids):
            self._kill(victim)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
