"""The sensors that advance a project (they launch what the plan returns), and the nightly evaluation."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import dagster as dg

from rft_platform.common.errors import UserError
from rft_platform.config.resolve import OfflineKind
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.driver_lock import driver_is_running
from rft_platform.jobs.instance import end_orphaned_runs
from rft_platform.jobs.jobs import JOB_OF_KIND, UnresolvedJob, add_rounds, evaluation_config, run_tags
from rft_platform.jobs.launches import launches
from rft_platform.jobs.reconcile_materializations import reconcile_materializations
from rft_platform.jobs.sensor_interval import sensor_interval_s
from rft_platform.object_store.mirror import mirror_of
from rft_platform.resources.names import DagsterNames
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.planning.plan import Plan, plan_next
from rft_platform.rounds.planning.project_state import observe
from rft_platform.rounds.project.record import published
from rft_platform.rounds.selection.row_selection import rounds_ahead

LOG = logging.getLogger(__name__)
_TICK_S = sensor_interval_s()
_DRIVEN_TICKS = 6  # after so many missed ticks another home may continue the project
_DRIVEN = "`rft run` or `rft demo` is driving this project"
_RECONCILE_S = 0.3  # seconds of a tick; a whole tick should take less than one


def experience_threshold_sensor(names: DagsterNames, job: UnresolvedJob) -> dg.SensorDefinition:
    """The sensor that launches the plan's next training of a round, by ``job``."""
    description = "Starts a round's training once enough of its experience rows are stored."
    return _sensor(names, "experience_threshold_sensor", [job], ("sync",), description)


def next_round_sensor(names: DagsterNames, jobs: Mapping[str, UnresolvedJob]) -> dg.SensorDefinition:
    """The sensor that launches the plan's next work except the training of a round, by those of ``jobs`` that do it.

    ``jobs`` are the project's jobs by plain name.
    """
    planned = [jobs[job] for kind, job in JOB_OF_KIND.items() if kind != "sync" and job in jobs]
    kinds = ("warm_start", "explore", "collect", "evaluate", *get_args(OfflineKind))
    description = (
        "Starts the warm start, then the next round's exploration, until the budget of rounds is spent; for an offline "
        "project, the training; in mode bench, one evaluation after another."
    )
    return _sensor(names, "next_round_sensor", planned, kinds, description)


def _sensor(
    names: DagsterNames, name: str, jobs: Sequence[UnresolvedJob], kinds: tuple[str, ...], description: str
) -> dg.SensorDefinition:
    """The sensor that launches the work of the plan whose kind is one of ``kinds``."""

    def launch(context: dg.SensorEvaluationContext, project: ProjectResource) -> dg.SensorResult | dg.SkipReason:
        return _launch(context, project, names, kinds)

    return dg.sensor(
        name=names.name(name),
        jobs=jobs,
        minimum_interval_seconds=_TICK_S,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=f"{description} A skipped tick says what it waits for. `rft ui --auto` and `rft serve` turn the "
        "sensor on.",
    )(names.bound(launch))


def evaluation_schedule(names: DagsterNames, job: UnresolvedJob, cron: str | None) -> dg.ScheduleDefinition:
    """The schedule that evaluates the newest policy by ``job``, at the times ``cron``; None: off, at 3 o'clock.

    A project that sets the key wants the evaluation, so its schedule is on. If Dagster does not accept the times of a
    stored configuration, the schedule is off: the other definitions have to load.
    """
    try:
        return _evaluation_schedule(names, job, cron)
    except dg.DagsterInvalidDefinitionError as error:
        LOG.warning("evaluation.schedule %r is not used: %s", cron, error)
        return _evaluation_schedule(names, job, None)


def _evaluation_schedule(names: DagsterNames, job: UnresolvedJob, cron: str | None) -> dg.ScheduleDefinition:
    def nightly_evaluation(
        context: dg.ScheduleEvaluationContext, project: ProjectResource
    ) -> dg.RunRequest | dg.SkipReason:
        return _evaluation_request(context.instance, project, names)

    return dg.schedule(
        name=names.name(nightly_evaluation.__name__),
        job=job,
        cron_schedule=cron or "0 3 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING if cron else dg.DefaultScheduleStatus.STOPPED,
        description="Evaluates the policy of the newest synced round on the held-out tasks, at the times of "
        "evaluation.schedule; without that key the schedule is off.",
    )(names.bound(nightly_evaluation))


def _evaluation_request(
    instance: dg.DagsterInstance, project: ProjectResource, names: DagsterNames
) -> dg.RunRequest | dg.SkipReason:
    """Request an evaluation of the newest round that has a policy, unless a driver uses the engine."""
    try:
        opened = project.open()
    except UserError as nothing_to_do:
        return dg.SkipReason(str(nothing_to_do))
    if driver_is_running(opened.home):
        return dg.SkipReason(_DRIVEN)
    synced = [number for number in opened.store.rounds() if number and published(opened.store, number) is not None]
    if not synced:
        return dg.SkipReason("no round has published a policy yet")
    newest = max(synced)
    add_rounds(instance, opened, names)  # an instance that only mounts the folder does not know the round's partition
    return dg.RunRequest(
        partition_key=round_key(newest),
        tags=run_tags(newest),
        run_config=evaluation_config(names),
    )


def _launch(
    context: dg.SensorEvaluationContext, project: ProjectResource, names: DagsterNames, kinds: tuple[str, ...]
) -> dg.SensorResult | dg.SkipReason:
    try:
        opened = project.open()
    except UserError as nothing_to_do:
        return dg.SkipReason(str(nothing_to_do))
    if driver_is_running(opened.home):
        return dg.SkipReason(_DRIVEN)
    if (mirror := mirror_of(opened.home.root)) is not None:
        mirror.driven_for(_DRIVEN_TICKS * _TICK_S)
    end_orphaned_runs(context.instance)
    add_rounds(context.instance, opened, names)
    known = launches(context.instance, rounds_ahead(opened), names)
    reconcile_materializations(opened, context.instance, known.failures, known.running, names, within_s=_RECONCILE_S)
    plan = plan_next(observe(opened, known))
    requests = list(_requests(plan, names, kinds))
    if not requests:
        return dg.SkipReason(_why_not(plan))
    rounds = [request.partition_key for request in requests if request.partition_key]
    return dg.SensorResult(
        run_requests=requests, dynamic_partitions_requests=[names.rounds.build_add_request(rounds)] if rounds else []
    )


def _requests(plan: Plan, names: DagsterNames, kinds: tuple[str, ...]) -> Iterator[dg.RunRequest]:
    for action in plan.actions:
        if action.kind in kinds:
            yield dg.RunRequest(
                run_key=action.run_key,  # with the attempt: Dagster launches a key only once, even if the run fails
                job_name=names.name(JOB_OF_KIND[action.kind]),
                partition_key=action.partition,
                run_config=evaluation_config(names, promote=False) if action.kind == "evaluate" else {},
                tags=run_tags(action.round),
            )


def _why_not(plan: Plan) -> str:
    if plan.finished:
        return "all rounds of the budget are done"
    return plan.failed or "; ".join(plan.waiting) or "the other sensor has to launch its work first"
