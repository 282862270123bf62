"""Dagster's run launcher, extended.

Two daemons do not start one run twice, dead workers are noticed, and a run can be cancelled while its code server is
dead.
"""

from pathlib import Path

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, DefaultRunLauncher, LaunchRunContext, WorkerStatus
from dagster._serdes.config_class import ConfigurableClassData

from rft_platform.assets.run_failure import FAULT_TAGS, fault_tags
from rft_platform.common.errors import TransientError
from rft_platform.common.locks import locked
from rft_platform.jobs.dagster_internals.run_workers import (
    RunWorkers,
    claim,
    driver_is_alive,
    driver_of,
    drop_claims,
    interrupt,
    is_claimed,
    is_elsewhere,
)

_PARTITION_TAG = "dagster/partition"
_UNDER_WAY = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
_MAX_CLAIMS = 100  # number of claims above which those of ended runs are removed


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches each run once, allows one active run per job and round, and monitors the workers."""

    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__(inst_data)
        self._workers = RunWorkers()

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start the run's worker, unless it was started already or another run of the same job is active.

        If two daemons dequeue the same run, only one worker starts. Of two runs of the same job and round, the later
        run is refused: it fails with an error that names the earlier run.
        """
        run = context.dagster_run
        with locked(self._claims / ".launch"):
            if is_claimed(self._claims, run.run_id):
                self._instance.report_engine_event("Another daemon has already launched this run.", run, cls=type(self))
                return
            other = self._active_twin(run)
            claim(self._claims, run.run_id)
            self._drop_ended_claims()
        self._clear_inherited_fault(run)
        if other is None:
            super().launch_run(context)
        else:
            self._refuse(run, other)

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
        if reported is None or is_elsewhere(self._claims, run.run_id):
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

    @property
    def _claims(self) -> Path:
        return Path(self._instance.root_directory) / "launched"

    def _terminate_worker(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished or driver_of(run) is not None:
            return False
        reported = self._workers.reported(self._instance, run_id)
        if reported is None or is_elsewhere(self._claims, run_id):
            return False
        worker = self._workers.find(run_id, *reported)
        if worker is None:
            self._instance.report_run_canceled(run, f"The run's worker, process {reported[0]}, had already ended.")
            self._instance.event_log_storage.free_concurrency_slots_for_run(run_id)
        else:
            self._report(run_id, f"Interrupting the run's worker, process {worker.pid}.")
            interrupt(worker)
        return True

    def _active_twin(self, run: dg.DagsterRun) -> dg.DagsterRun | None:
        """A launched run of the same job and round that has not ended."""
        if run.job_name.startswith("__"):  # Dagster's implicit job: any selection of assets
            return None
        partition = run.tags.get(_PARTITION_TAG)
        filters = dg.RunsFilter(
            job_name=run.job_name, statuses=_UNDER_WAY, tags={_PARTITION_TAG: partition} if partition else {}
        )
        others = [other for other in self._instance.get_runs(filters) if other.run_id != run.run_id]
        return next((other for other in others if self._is_launched(other)), None)

    def _is_launched(self, run: dg.DagsterRun) -> bool:
        driver = driver_of(run)
        return is_claimed(self._claims, run.run_id) if driver is None else driver_is_alive(driver)

    def _refuse(self, run: dg.DagsterRun, other: dg.DagsterRun) -> None:
        where = f" for {run.tags[_PARTITION_TAG]}" if _PARTITION_TAG in run.tags else ""
        cause = f"{run.job_name}{where} is already running in run {other.run_id}: wait for that run, or cancel it first"
        self._instance.add_run_tags(run.run_id, fault_tags(TransientError(cause), run.run_id))
        self._instance.report_run_failed(run, f"Refused: {cause}.")

    def _clear_inherited_fault(self, run: dg.DagsterRun) -> None:
        """Empty the fault tags that a re-executed run copied from the failed run; Dagster cannot remove tags."""
        inherited = dict.fromkeys(FAULT_TAGS & run.tags.keys(), "")
        if inherited:
            self._instance.add_run_tags(run.run_id, inherited)

    def _drop_ended_claims(self) -> None:
        if sum(1 for _ in self._claims.iterdir()) > _MAX_CLAIMS:
            runs = self._instance.get_runs(dg.RunsFilter(statuses=[*_UNDER_WAY, dg.DagsterRunStatus.QUEUED]))
            drop_claims(self._claims, keep=[run.run_id for run in runs])

    def _report(self, run_id: str, message: str) -> None:
        run = self._instance.get_run_by_id(run_id)
        if run is not None:
            self._instance.report_engine_event(message, run, cls=type(self))


def _health(alive: bool, what: str) -> CheckRunHealthResult:
    if alive:
        return CheckRunHealthResult(WorkerStatus.RUNNING)
    return CheckRunHealthResult(WorkerStatus.FAILED, f"{what} has ended without finishing the run")
