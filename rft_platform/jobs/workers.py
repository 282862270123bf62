"""Run workers, the processes that runs work in: which one is a run's, whether it lives, and how it is interrupted."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psutil

from rft_platform.processes.lease import CREATE_TIME_TOLERANCE_S

STOPPED_LIMIT_S = 120.0
_STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
#: What Dagster's run workers are started with: a pid that was given to some other program is told by it.
_WORKER_COMMANDS = ("multiprocessing", "dagster")


@dataclass(slots=True)
class Workers:
    """The run workers of this machine; remembers when those it has seen were started."""

    births: dict[str, float] = field(default_factory=dict)  # run id -> birth of its worker
    stopped: dict[str, float] = field(default_factory=dict)  # run id -> since when its worker is stopped (monotonic)

    def pid_of(self, instance: dg.DagsterInstance, run_id: str) -> int | None:
        """Process id that the run's worker has reported; None where it has not (yet)."""
        reported = self.reported(instance, run_id)
        return None if reported is None else reported[0]

    def reported(self, instance: dg.DagsterInstance, run_id: str) -> tuple[int, float] | None:
        """Process id that the run's worker has reported, and when (seconds since the epoch); the newest counts."""
        events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        found = [(pid, event.timestamp) for event in events if (pid := pid_in(event.message)) is not None]
        return found[-1] if found else None

    def find(self, run_id: str, pid: int, reported_at: float) -> psutil.Process | None:
        """The run's living worker, or None where it has ended (and its pid perhaps serves another).

        A process that began after the worker had reported its pid, at ``reported_at``, is another one: a container
        that is made anew hands out the same small pids again. Of a worker that was seen before, its birth tells.
        """
        born = birth(pid)
        known = self.births.get(run_id)
        if born is None or (known is not None and born != known):
            return None
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if known is None and process.create_time() > reported_at + CREATE_TIME_TOLERANCE_S:
                return None
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and any(word in command for word in _WORKER_COMMANDS):
                self.births[run_id] = born
                return process
        return None

    def end_if_stopped(self, run_id: str, worker: psutil.Process) -> bool:
        """Kill a worker that has been stopped (SIGSTOP) for ``STOPPED_LIMIT_S``; whether it was killed."""
        with suppress(psutil.NoSuchProcess):
            if worker.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                self.stopped.pop(run_id, None)
            elif time.monotonic() - self.stopped.setdefault(run_id, time.monotonic()) > STOPPED_LIMIT_S:
                worker.kill()
                return True
        return False


def pid_in(message: str | None) -> int | None:
    """The pid that Dagster's message about a started run worker names; None for any other message."""
    found = _STARTED.search(message or "")
    return int(found[1]) if found else None


def birth(pid: int) -> float | None:
    """When a process began, on a clock that setting the time of day does not move; None where there is none.

    On Linux ticks since the boot; elsewhere seconds since the epoch, as psutil gives them.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return float(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def interrupt(process: psutil.Process) -> None:
    """Interrupt a run worker as Dagster's own cancellation does: its run ends as cancelled."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGINT)


def claim(folder: Path, run_id: str) -> bool:
    """Claim the launch of a run for this machine; False where somebody did before. Atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(folder / run_id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(socket.gethostname())
    return True


def is_elsewhere(folder: Path, run_id: str) -> bool:
    """Whether the run's worker was started on another machine (or in another container): its pid says nothing here."""
    try:
        return (folder / run_id).read_text(encoding="utf-8") not in ("", socket.gethostname())
    except FileNotFoundError:
        return False


def is_claimed(folder: Path, run_id: str) -> bool:
    """Whether somebody has claimed the launch of a run."""
    return (folder / run_id).exists()


def drop_claims(folder: Path, keep: Iterable[str]) -> None:
    """Remove the claims of all runs but ``keep``: a run that has ended is never launched again."""
    kept = set(keep)
    for file in folder.iterdir():
        if file.name not in kept and not file.name.startswith("."):
            file.unlink(missing_ok=True)
