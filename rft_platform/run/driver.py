"""In-process driver: runs the jobs that the plan returns in this process, on the persistent Dagster instance.

The daemon and its sensors do the same in other processes. Both ways create the same runs, assets and lineage. If
exploration may lead training (``synchronizer.sync_offset``), a second thread trains while the first one explores.
"""

import gc
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import dagster as dg

from rft_platform.assets.round_lock import cancel_work_of, release_rounds
from rft_platform.cluster.this_process import interrupt
from rft_platform.common.errors import RftError, TransientError, UserError
from rft_platform.common.fault_classification import as_fault, cause_line
from rft_platform.config.allowed_changes import changed_keys
from rft_platform.config.load import load_config_of
from rft_platform.config.online_halves import joined
from rft_platform.jobs.alerts import alert_run_failed
from rft_platform.jobs.dagster_internals.run_launcher import driver_tags
from rft_platform.jobs.driver_lock import config_lock, driver_lock, is_half, other_half_runs
from rft_platform.jobs.instance import end_orphaned_runs, open_instance
from rft_platform.jobs.jobs import JOB_OF_KIND, add_rounds, evaluation_config, run_tags
from rft_platform.jobs.launches import launches
from rft_platform.jobs.reconcile_materializations import reconcile_materializations
from rft_platform.jobs.run_error import run_error
from rft_platform.object_store.mirror import mirror_of
from rft_platform.online.project import open_project
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.planning.plan import Action, Plan, plan_next
from rft_platform.rounds.planning.project_state import Failures, Launches, observe
from rft_platform.rounds.project.project import Project

LOG = logging.getLogger(__name__)

#: Events go to the instance; the terminal is reserved for progress.
_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}

_BENCH = evaluation_config(PLAIN_NAMES, promote=False)
_ALL_KINDS = frozenset(JOB_OF_KIND)
_TRAININGS = frozenset({"sync"})

_DATABASE_WAITS_S = (1.0, 5.0, 20.0)  # before further attempts when the database's connection was lost
_POLL_S = 0.5  # while waiting for a retry
_INTERRUPTED_S = 20.0  # time for a training to end after Ctrl-C; the next drive marks a run that took longer as failed

#: Launches between full garbage collections. A Dagster run leaves half a megabyte of reference cycles.
_COLLECT_EVERY = 10
#: Collections of the second generation between full ones; Python's default is 10. A full collection scans all
#: libraries, which takes a quarter of a second, and the rows of a round would cause several.
_FULL_AFTER = 50


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
    error: RftError | None = None  # the error of the last failed launch


def drive(
    project: Project,
    definitions: dg.Definitions,
    max_launches: int | None = None,
    result: DriveResult | None = None,
) -> DriveResult:
    """Launch what the plan returns until everything is done, a launch has failed permanently, or a limit is reached.

    With ``max_launches``, one launch runs at a time. In modes explore and train the driver waits for the other half of
    the project: without limit while the other half has a driver, else for ``synchronizer.sync_timeout`` seconds.
    Failures of earlier drives are not counted: a new start of the driver implies that their cause is fixed.
    The launches are added to ``result`` as they end, so a caller that gives it has those of an interrupted drive.
    """
    mirror = mirror_of(project.home.root)
    with (
        _driving(project),
        nullcontext() if mirror is None else mirror.driving(),  # keeps the copy on the object store current
        open_instance(project.home, capture_output=False) as instance,
        _rare_full_collections(),
    ):
        _alert(
            project, instance, end_orphaned_runs(instance), "the process that drove this run ended before the run did"
        )
        known, stored = launches(instance), open_project(project.home)  # ``project`` may be in mode bench
        reconcile_materializations(stored, instance, known.failures, known.running)
        add_rounds(instance, stored)
        driven = _Drive(project, definitions, instance, max_launches, DriveResult() if result is None else result)
        if max_launches is None and _overlaps(project):
            driven.run_two_threads()
        else:
            driven.run_one_thread()
        add_rounds(instance, stored)
    return driven.result


def run_job(project: Project, definitions: dg.Definitions, job: str) -> None:
    """Run a job without partitions in this process. Raises the error of its asset, or UserError while a driver runs."""
    with _driving(project), open_instance(project.home, capture_output=False) as instance:
        run_id = str(uuid.uuid4())
        try:
            definitions.resolve_job_def(job).execute_in_process(
                instance=instance, run_id=run_id, tags=driver_tags(run_id), run_config=_QUIET
            )
        except Exception as raised:
            raise run_error(raised) from raised


@contextmanager
def _driving(project: Project) -> Iterator[None]:
    """Hold the driver's lock during the block.

    Raises UserError if another driver holds it, or if another command, which started at the same time, has replaced
    the configuration that ``project`` was opened with.
    """
    home, own = project.home, project.config
    with driver_lock(home, own.mode):
        with config_lock(home):  # wait for a command that found no driver and still writes
            stored = load_config_of(home)
        if changed := changed_keys(stored, joined(stored, own)).keys() - {"mode"}:
            raise UserError(
                f"{home.config_file}: another command has written other values of {', '.join(sorted(changed))} since "
                "this one wrote its own; run one of the two commands again"
            )
        yield


def _overlaps(project: Project) -> bool:
    """Whether explorations and trainings run at the same time.

    In the dynamic styles exploration and training take turns: a training takes the rows that have landed, so a drive
    gives the same result only if their order is fixed.
    """
    config = project.config
    return (
        config.mode in ("both", "colocate")
        and not config.synchronizer.dynamic
        and config.synchronizer.offset_rounds > 0
    )


class _Drive:
    """The launches of one drive, one after the other or, in two threads, trainings beside the others."""

    def __init__(
        self,
        project: Project,
        definitions: dg.Definitions,
        instance: dg.DagsterInstance,
        max_launches: int | None,
        result: DriveResult,
    ) -> None:
        self.result = result
        self._project = project
        self._definitions = definitions
        self._instance = instance
        self._max_launches = max_launches
        self._attempts = _Attempts()
        self._half = _OtherHalf(project)
        self._changed = threading.Condition()  # guards the attempts, the result, and the fields below
        self._running: set[tuple[str, int]] = set()
        self._ended = False

    def run_one_thread(self) -> None:
        """Run all launches in this thread. On Ctrl-C the running asset cancels its work."""
        self._run(_ALL_KINDS)

    def run_two_threads(self) -> None:
        """Run the trainings in a second thread, and the other launches in this one. Only this thread gets Ctrl-C."""
        errors: list[BaseException] = []

        def run_trainings() -> None:
            try:
                self._run(_TRAININGS)
            except BaseException as error:
                errors.append(error)

        trainings = threading.Thread(target=run_trainings, name="trainings", daemon=True)
        trainings.start()
        try:
            self._run(_ALL_KINDS - _TRAININGS)
            trainings.join()
        except BaseException:
            _end_interrupted(trainings)
            raise
        if errors:
            raise errors[0]

    def _run(self, kinds: frozenset[str]) -> None:
        """Run launches of these kinds, one after the other, until the drive ends."""
        try:
            while (action := self._next(kinds)) is not None:
                self._note(_launch(self._instance, self._definitions, action))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self, kinds: frozenset[str]) -> Action | None:
        """The next launch of these kinds, when the plan has one; None at the end of the drive."""
        with self._changed:
            while not self._ended and (self._max_launches is None or len(self.result.launched) < self._max_launches):
                known, now = self._attempts.launches(self._running), time.monotonic()
                expected = self._half.expected()
                plan = plan_next(observe(self._project, known, now, other_half=expected))
                if plan.finished or plan.failed:
                    self.result.finished, self.result.failed = plan.finished, plan.failed
                    return None
                for action in plan.actions:
                    if action.kind in kinds:
                        self._running.add((action.kind, action.round))
                        return action
                if not plan.actions and not self._running and plan.retry_in is None:
                    if expected and self._half.wait(plan):
                        continue
                    self.result.failed = self._half.missing
                    return None
                self._attempts.log_retries(plan)
                self._changed.wait(None if plan.retry_in is None else min(plan.retry_in, _POLL_S))
        return None

    def _note(self, launched: Launched) -> None:
        with self._changed:
            self._running.discard((launched.kind, launched.round))
            self.result.launched.append(launched)
            self.result.error = launched.error or self.result.error
            self._attempts.note(launched)
            self._changed.notify_all()
        if len(self.result.launched) % _COLLECT_EVERY == 0:
            gc.collect()
        if launched.error is not None:  # if it failed after its last note, the plan does not repeat the launch
            _with_database(lambda: self._reconcile(launched))
            _alert(self._project, self._instance, [launched.run_id], cause_line(launched.error))

    def _reconcile(self, launched: Launched) -> None:
        stored, running = open_project(self._project.home), launches(self._instance).running
        reconcile_materializations(stored, self._instance, [(launched.kind, launched.round)], running)


def _with_database(work: Callable[[], None]) -> None:
    """Do ``work``, again after some seconds if the connection to Dagster's database was lost."""
    for wait_s in _DATABASE_WAITS_S:
        try:
            return work()
        except Exception as raised:
            error = as_fault(raised)
            if not isinstance(error, TransientError):
                raise
            LOG.warning("%s; tried again in %g s", cause_line(error), wait_s)
        time.sleep(wait_s)
    return work()


@contextmanager
def _rare_full_collections() -> Iterator[None]:
    """Let Python itself collect all objects rarely during the block."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, _FULL_AFTER))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _end_interrupted(trainings: threading.Thread) -> None:
    """Cancel the work of a thread, repeatedly, until the thread has ended or ``_INTERRUPTED_S`` seconds have passed."""
    interrupt(trainings)  # an error that the thread raises after this call is not a failure, even after the wait
    until = time.monotonic() + _INTERRUPTED_S
    while trainings.is_alive() and time.monotonic() < until:  # repeated: the thread may just have requested new work
        cancel_work_of(trainings)
        trainings.join(_POLL_S)


@dataclass(slots=True)
class _OtherHalf:
    """The driver of the other half of the project, as a driver of mode explore or train sees it."""

    project: Project
    missing: str | None = None  # why this driver stopped waiting for the other half
    alone_since: float | None = None
    said: tuple[str, ...] = ()

    def expected(self) -> bool:
        """Whether another driver, which may start later, has to do the other half.

        In the dynamic styles an explorer does not need a trainer.
        """
        config = self.project.config
        if not is_half(config.mode) or self.project.settings.offline is not None:
            return False
        alone = config.mode == "explore" and config.synchronizer.dynamic
        return not alone or other_half_runs(self.project.home, config.mode)

    def wait(self, plan: Plan) -> bool:
        """Sleep for a short time; False if the other half has had no driver for too long."""
        config = self.project.config
        if plan.waiting != self.said:
            LOG.log(logging.INFO if self.said else logging.WARNING, "waits: %s", "; ".join(plan.waiting))
            self.said = plan.waiting
        now, limit = time.monotonic(), config.synchronizer.sync_timeout
        if other_half_runs(self.project.home, config.mode):
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now
        elif now - self.alone_since > limit:
            other = "train" if config.mode == "explore" else "explore"
            self.missing = (
                f"{'; '.join(plan.waiting)}, and no driver of the other half has run for {limit:g} s "
                f"(synchronizer.sync_timeout): start `rft run` with mode {other}"
            )
            return False
        time.sleep(_POLL_S)
        return True


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
        """Record the end of a launch: count a failure, or reset the count after a success."""
        key, error = (launched.kind, launched.round), launched.error
        known = self.failures.pop(key, Failures(0))
        if error is not None:
            self.failures[key] = Failures(known.count + 1, cause_line(error), error.retryable, time.monotonic())

    def launches(self, running: set[tuple[str, int]]) -> Launches:
        """The record of launches for the plan; ``running`` are those that run now, as (kind, round)."""
        return Launches(running=frozenset(running), failures=dict(self.failures))

    def log_retries(self, plan: Plan) -> None:
        """Log each retry that the plan waits for, once."""
        failures = str(sorted(self.failures.items()))
        if plan.retry_in is None or failures in self.logged_waits:
            return
        self.logged_waits.add(failures)
        for line in plan.waiting:
            if ": retry " in line:  # only the retry, not other reasons for waiting
                LOG.warning("%s", line)


def _launch(instance: dg.DagsterInstance, definitions: dg.Definitions, action: Action) -> Launched:
    wall, cpu = time.perf_counter(), time.process_time()
    run_id, error = str(uuid.uuid4()), None
    key = action.partition
    try:
        if key:
            instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), [key])
        definitions.resolve_job_def(JOB_OF_KIND[action.kind]).execute_in_process(
            instance=instance,
            partition_key=key,
            run_id=run_id,
            tags={**run_tags(action.round), **driver_tags(run_id)},
            run_config={**_QUIET, **_BENCH} if action.kind == "evaluate" else _QUIET,
        )
    except Exception as raised:
        error = run_error(raised)
    finally:
        release_rounds(run_id)
    return Launched(action.kind, action.round, run_id, time.perf_counter() - wall, time.process_time() - cpu, error)
