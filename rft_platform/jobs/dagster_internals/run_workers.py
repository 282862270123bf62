"""The processes that execute runs: the run workers of the daemon, and drivers.

``RunWorkers`` finds a run's worker and checks that it is alive. Two tags, which Dagster does not show, name the machine
on which a run was launched and the process of a run that a driver executes, so that others can detect its death.

Upstream: Dagster exports no way to find a run's process; its id is read from the message that the worker logs.
"""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

import dagster as dg
import psutil

from rft_platform.cluster.local.processes import CREATE_TIME_TOLERANCE_S, find_process, start_ticks

# Tags of runs. A re-executed run inherits the tags of the first run, so each value ends in the id of its run.
DRIVER_TAG = ".dagster/rft_driver"  # Dagster does not show tags with this prefix: they are long and for programs only
_HOST_TAG = ".dagster/rft_host"
STOPPED_LIMIT_S = 120.0
_STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
#: Words in the command line of Dagster's run workers; a reused pid of another program lacks them.
_WORKER_COMMANDS = ("multiprocessing", "dagster")


@dataclass(slots=True)
class RunWorkers:
    """The run workers of this machine; remembers the start times of workers that it has seen."""

    start_times: dict[str, float] = field(default_factory=dict)  # run id -> ticks from the boot to its worker
    stopped: dict[str, float] = field(default_factory=dict)  # run id -> monotonic time at which the stop was first seen

    def reported(self, instance: dg.DagsterInstance, run_id: str) -> tuple[int, float] | None:
        """Newest process id that the run's worker reported, and the time of the report (seconds since the epoch)."""
        events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        found = [(pid, event.timestamp) for event in events if (pid := pid_in(event.message)) is not None]
        return found[-1] if found else None

    def find(self, run_id: str, pid: int, reported_at: float) -> psutil.Process | None:
        """The run's live worker; None if it has ended, even if its pid was reused.

        A process that started after ``reported_at``, the time at which the worker reported its pid, is a different one:
        a recreated container assigns the same small pids again. A worker seen before is identified by its start time.
        """
        known = self.start_times.get(run_id)
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            started = start_ticks(pid) or process.create_time()  # ticks do not change with the clock of the system
            is_later = process.create_time() > reported_at + CREATE_TIME_TOLERANCE_S
            is_another = is_later if known is None else known != started
            command = " ".join(process.cmdline())
            is_worker = process.status() != psutil.STATUS_ZOMBIE and any(word in command for word in _WORKER_COMMANDS)
            if is_worker and not is_another:
                self.start_times[run_id] = started
                return process
        return None

    def end_if_stopped(self, run_id: str, worker: psutil.Process) -> bool:
        """Kill a worker that has been stopped (SIGSTOP) for ``STOPPED_LIMIT_S``; returns whether it was killed."""
        with suppress(psutil.NoSuchProcess):
            if worker.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                self.stopped.pop(run_id, None)
            elif time.monotonic() - self.stopped.setdefault(run_id, time.monotonic()) > STOPPED_LIMIT_S:
                worker.kill()
                return True
        return False


def pid_in(message: str | None) -> int | None:
    """The pid in Dagster's message about a started run worker; None for any other message."""
    found = _STARTED.search(message or "")
    return int(found[1]) if found else None


def interrupt(process: psutil.Process) -> None:
    """Interrupt a run worker as Dagster's own cancellation does; the run ends as cancelled."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGINT)


def launch_tags(run_id: str) -> dict[str, str]:
    """The machine or container that launches the run."""
    return {_HOST_TAG: f"{socket.gethostname()}@{run_id}"}


def host_of(run: dg.DagsterRun) -> str | None:
    """The machine or container that launched the run; None if it was not launched yet."""
    host, _, run_id = run.tags.get(_HOST_TAG, "").rpartition("@")
    return host if run_id == run.run_id else None


def is_elsewhere(run: dg.DagsterRun) -> bool:
    """Whether the run was launched on another machine or container, so that its worker's pid is not valid here."""
    return host_of(run) not in (None, socket.gethostname())


def driver_tags(run_id: str) -> dict[str, str]:
    """The driver process of the run, so that a later driver can detect its death."""
    return {DRIVER_TAG: f"{os.getpid()}@{psutil.Process().create_time()}@{run_id}"}


def driver_of(run: dg.DagsterRun) -> str | None:
    """The run's own driver tag; None if no driver runs it."""
    tag = run.tags.get(DRIVER_TAG)
    return tag if tag is not None and tag.partition("@")[2].partition("@")[2] in ("", run.run_id) else None


def is_driven_here(run: dg.DagsterRun) -> bool:
    """Whether this process is the run's driver."""
    return run.tags.get(DRIVER_TAG) == driver_tags(run.run_id)[DRIVER_TAG]


def driver_is_alive(tag: str) -> bool:
    """Whether the process in a ``driver_tags`` value still runs."""
    pid, created, *_ = tag.split("@")
    return find_process(int(pid), float(created)) is not None
