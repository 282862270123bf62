"""Dagster's run launcher, extended, and the processes that execute runs: the run workers of the daemon, and drivers.

A dead worker is noticed, a run can be cancelled while its code server is dead, and two daemons do not start one run
twice. ``RunWorkers`` finds a run's worker and checks that it is alive. Two tags, which Dagster does not show, name the
machine on which a run was launched and the process of a run that a driver executes, so that others can detect its
death.

Upstream: only launchers of containers (Docker, Kubernetes, ECS) implement ``check_run_worker_health``. With
``DefaultRunLauncher``, a run whose worker and code server have died stays STARTED for ever and cannot be cancelled
(https://github.com/dagster-io/dagster/issues/17403, /issues/32216). The classes of a health check are not exported.
Nor is there a way to find a run's process; its id is read from the message that the worker logs.
"""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import psutil
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, LaunchRunContext, WorkerStatus
from dagster._serdes.config_class import ConfigurableClassData

from rft_platform.assets.run_failure import FAULT_TAGS
from rft_platform.cluster.local.locks import locked
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


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches each run once, and monitors the workers."""

    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(inst_data)
        self._workers = RunWorkers()

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start the run's worker, unless another daemon, which dequeued the same run, has started it."""
        run = context.dagster_run
        with locked(Path(self._instance.root_directory) / "launch"):
            stored = self._instance.get_run_by_id(run.run_id) or run
            if host_of(stored) is not None:
                self._instance.report_engine_event("Another daemon has already launched this run.", run, cls=type(self))
                return
            # Dagster cannot remove tags: the fault that a re-executed run copied from the failed run is emptied
            inherited = dict.fromkeys(FAULT_TAGS & stored.tags.keys(), "")
            self._instance.add_run_tags(run.run_id, {**inherited, **launch_tags(run.run_id)})
        super().launch_run(context)

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Run monitoring checks the workers' health."""
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Whether the process that executes the run is alive. A starting or unknown process counts as alive."""
        driver = driver_of(run)
        if driver is not None:
            return _health(driver_is_alive(driver), "the process that drove this run")
        reported = self._workers.reported(self._instance, run.run_id)
        if reported is None or is_elsewhere(run):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        worker = self._workers.find(run.run_id, *reported)
        alive = worker is not None and not self._workers.end_if_stopped(run.run_id, worker)
        return _health(alive, f"the run's worker, process {reported[0]},")

    def terminate(self, run_id: str) -> bool:
        """Cancel a run through its code server; if the server is gone, interrupt the worker directly.

        If the worker is gone as well, the run ends as cancelled at once.
        """
        try:
            if super().terminate(run_id):
                return True
        except Exception as error:  # any error of a call to a dead code server
            self._report(run_id, f"The code server rejected the cancellation ({type(error).__name__}).")
        return self._terminate_worker(run_id)

    def _terminate_worker(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished or driver_of(run) is not None:
            return False
        reported = self._workers.reported(self._instance, run_id)
        if reported is None or is_elsewhere(run):
            return False
        worker = self._workers.find(run_id, *reported)
        if worker is None:
            self._instance.report_run_canceled(run, f"The run's worker, process {reported[0]}, had already ended.")
            self._instance.event_log_storage.free_concurrency_slots_for_run(run_id)
        else:
            self._report(run_id, f"Interrupting the run's worker, process {worker.pid}.")
            interrupt(worker)
        return True

    def _report(self, run_id: str, message: str) -> None:
        run = self._instance.get_run_by_id(run_id)
        if run is not None:
            self._instance.report_engine_event(message, run, cls=type(self))


def _health(alive: bool, what: str) -> CheckRunHealthResult:
    if alive:
        return CheckRunHealthResult(WorkerStatus.RUNNING)
    return CheckRunHealthResult(WorkerStatus.FAILED, f"{what} has ended without finishing the run")
