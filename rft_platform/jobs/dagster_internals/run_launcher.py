"""Dagster's run launcher, extended.

A dead worker is noticed, a run can be cancelled while its code server is dead, and two daemons do not start one run
twice.

Upstream: only launchers of containers (Docker, Kubernetes, ECS) implement ``check_run_worker_health``. With
``DefaultRunLauncher``, a run whose worker and code server have died stays STARTED for ever and cannot be cancelled
(https://github.com/dagster-io/dagster/issues/17403, /issues/32216). The classes of a health check are not exported.
"""

from pathlib import Path

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, LaunchRunContext, WorkerStatus
from dagster._serdes.config_class import ConfigurableClassData

from rft_platform.assets.run_failure import FAULT_TAGS
from rft_platform.cluster.local.locks import locked
from rft_platform.jobs.dagster_internals.run_workers import (
    RunWorkers,
    driver_is_alive,
    driver_of,
    host_of,
    interrupt,
    is_elsewhere,
    launch_tags,
)


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
