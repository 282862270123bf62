"""In-process driver: runs the jobs that the plan returns in this process, on the persistent Dagster instance.

The daemon and its sensors do the same in other processes. Both leave the same runs, assets and lineage.
"""

import gc
import logging
import time
import uuid
from dataclasses import dataclass, field

import dagster as dg

from rft_platform.assets.common import rft_rounds
from rft_platform.common.errors import CheckFailedError, RftError
from rft_platform.common.fault_classification import as_fault, cause_line
from rft_platform.jobs.alerts import alert_run_failed
from rft_platform.jobs.dagster_internals.driver_instance import AssetCheckFailedError
from rft_platform.jobs.dagster_internals.run_workers import driver_tags
from rft_platform.jobs.driver_lock import driver_lock
from rft_platform.jobs.instance import end_orphaned_runs, open_instance
from rft_platform.jobs.jobs import BENCH, JOB_OF_KIND, add_next_round, run_tags
from rft_platform.jobs.launches import launches
from rft_platform.jobs.reconcile_materializations import reconcile_materializations
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Failures, Launches, observe
from rft_platform.rounds.planning.state import Action, Plan
from rft_platform.rounds.project.project import Project

LOG = logging.getLogger(__name__)

#: Events go to the instance; the terminal is reserved for progress.
_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}

_POLL_S = 0.5  # while waiting for a retry

#: Launches between full garbage collections. A Dagster run leaves half a megabyte of reference cycles. Python searches
#: old objects for them only after their number grew by a quarter: with all libraries loaded, 30 rounds.
_COLLECT_EVERY = 10


@dataclass(slots=True)
class Launched:
    """One job that the driver ran, with wall and CPU seconds of the driver's process."""

    kind: str
    round: int
    run_id: str
    wall_s: float
    cpu_s: float
    error: RftError | None = None


@dataclass(slots=True)
class DriveResult:
    """The launches of a drive and the reason why it ended."""

    launched: list[Launched] = field(default_factory=list)
    finished: bool = False
    failed: str | None = None
    error: RftError | None = None  # of the last failed launch


def drive(project: Project, definitions: dg.Definitions, max_launches: int | None = None) -> DriveResult:
    """Launch what the plan returns until everything is done, a launch has failed permanently, or a limit is reached.

    Failures of earlier drives are not counted: starting the driver again implies that their cause is fixed.
    """
    result, attempts = DriveResult(), _Attempts()
    with driver_lock(project.home), open_instance(project.home, capture_output=False) as instance:
        _alert(
            project, instance, end_orphaned_runs(instance), "the process that drove this run ended before the run did"
        )
        reconcile_materializations(project, instance, launches(instance).failures)
        add_next_round(instance, project)
        while max_launches is None or len(result.launched) < max_launches:
            plan = plan_next(observe(project, attempts.launches(), now=time.monotonic()))
            if not plan.actions and not plan.failed and plan.retry_in is not None:
                _wait(plan, attempts)
                continue
            if plan.finished or plan.failed or not plan.actions:
                result.finished, result.failed = plan.finished, plan.failed
                break
            launched = _launch(instance, definitions, plan.actions[0])
            result.launched.append(launched)
            attempts.note(launched)
            if len(result.launched) % _COLLECT_EVERY == 0:
                gc.collect()
            result.error = launched.error or result.error
            if launched.error is not None:
                _alert(project, instance, [launched.run_id], cause_line(launched.error))
        add_next_round(instance, project)
    return result


def _alert(project: Project, instance: dg.DagsterInstance, run_ids: list[str], cause: str) -> None:
    for run_id in run_ids:
        run = instance.get_run_by_id(run_id)  # includes the tags set at its end
        if run is not None:
            alert_run_failed(project.home, run, cause)


@dataclass(slots=True)
class _Attempts:
    """The launches of this drive as input for the plan; times are those of the monotonic clock."""

    failures: dict[tuple[str, int], Failures] = field(default_factory=dict)
    logged_waits: set[str] = field(default_factory=set)

    def note(self, launched: Launched) -> None:
        key, error = (launched.kind, launched.round), launched.error
        known = self.failures.pop(key, Failures(0))
        if error is not None:
            self.failures[key] = Failures(known.count + 1, cause_line(error), error.retryable, time.monotonic())

    def launches(self) -> Launches:
        return Launches(failures=dict(self.failures))


def _wait(plan: Plan, attempts: _Attempts) -> None:
    """Sleep for a short part of the wait for the next retry; log each wait once."""
    failures = str(sorted(attempts.failures.items()))
    if failures not in attempts.logged_waits:
        attempts.logged_waits.add(failures)
        for line in plan.waiting:
            if ": retry " in line:  # only the retry, not other reasons for waiting
                LOG.warning("%s", line)
    time.sleep(min(plan.retry_in or 0.0, _POLL_S))


def _launch(instance: dg.DagsterInstance, definitions: dg.Definitions, action: Action) -> Launched:
    wall, cpu = time.perf_counter(), time.process_time()
    run_id, error = str(uuid.uuid4()), None
    key = action.partition
    try:
        if key:
            instance.add_dynamic_partitions(str(rft_rounds.name), [key])
        definitions.resolve_job_def(JOB_OF_KIND[action.kind]).execute_in_process(
            instance=instance,
            partition_key=key,
            run_id=run_id,
            tags={**run_tags(action.round), **driver_tags(run_id)},
            run_config={**_QUIET, **BENCH} if action.kind == "evaluate" else _QUIET,
        )
    except Exception as raised:
        error = _fault_of(raised)
    return Launched(action.kind, action.round, run_id, time.perf_counter() - wall, time.process_time() - cpu, error)


def _fault_of(raised: Exception) -> RftError:
    """The error that the asset raised; an error of Dagster itself is classified here."""
    if isinstance(raised, dg.Failure) and isinstance(raised.__cause__, RftError):
        return raised.__cause__
    if isinstance(raised, AssetCheckFailedError):
        return CheckFailedError(str(raised).strip())
    return as_fault(raised)
