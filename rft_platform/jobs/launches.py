"""Read Dagster's record of the launches: which launches are running, the failures of each, and its next attempt."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import dagster as dg

from rft_platform.assets.run_failure import CAUSE_TAG, RETRYABLE_TAG, UNKNOWN_CAUSE, fault_of
from rft_platform.experience.file_names import is_round_key, round_key, round_number
from rft_platform.jobs.instance import is_orphaned
from rft_platform.jobs.jobs import kinds_by_job
from rft_platform.resources.names import PARTITION_TAG, PLAIN_NAMES, DagsterNames
from rft_platform.rounds.planning.project_state import Failures, Launches

_RUNNING = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
#: A cancelled run uses up its run key, as a failed run does.
_FAILED = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_RUN_KEY_TAG = "dagster/run_key"
# Number of newest successes read per job. Only the last rounds may be repeated, because a round with a successor is
# never trained again. If exploration leads training by N rounds, N more rounds are read; each may have been repeated.
# All successes of evaluations are read, because any round may be evaluated again (mode bench).
_RECENT = 16
_TIMED = 1000  # newest launches whose seconds are read: about 500 rounds
_ANY_ROUND = "evaluate"
#: Causes of runs that ended without a recorded cause.
_SILENT = {
    dg.DagsterRunStatus.CANCELED: "the run was cancelled",
    dg.DagsterRunStatus.FAILURE: UNKNOWN_CAUSE,
}

_Key = tuple[str, int]


def launches(instance: dg.DagsterInstance, offset_rounds: int = 0, names: DagsterNames = PLAIN_NAMES) -> Launches:
    """The running launches and the failures of each launch of a project, from the run records of the plan's jobs.

    ``offset_rounds`` is the number of rounds by which exploration may lead training. A caller that starts launches by
    run key must pass it.
    """
    kinds = kinds_by_job(names)
    recent = max(_RECENT, 2 * offset_rounds + 4)
    failed: dict[_Key, list[dg.RunRecord]] = defaultdict(list)  # newest first
    for record in instance.get_run_records(dg.RunsFilter(statuses=_FAILED)):
        if _is_launch(record.dagster_run, kinds):
            failed[_key(record.dagster_run, kinds)].append(record)
    limits = {job: None if kind == _ANY_ROUND else recent for job, kind in kinds.items()}
    succeeded = [record for job, limit in limits.items() for record in _successes(instance, job, limit)]
    newest_success = {_key(record.dagster_run, kinds): record.storage_id for record in reversed(succeeded)}
    since = {
        key: [record for record in records if record.storage_id > newest_success.get(key, -1)]
        for key, records in failed.items()
    }
    runs = [record.dagster_run for records in (succeeded, *failed.values()) for record in records]
    ended = Counter(_key(run, kinds) for run in runs)
    for run in runs:  # those of lower attempts may have been pruned
        ended[_key(run, kinds)] = max(ended[_key(run, kinds)], _attempt(run) + 1)
    running = [run for run in instance.get_runs(dg.RunsFilter(statuses=_RUNNING)) if _is_launch(run, kinds)]
    return Launches(
        running=frozenset(_key(run, kinds) for run in running),
        failures={key: _failures(records) for key, records in since.items() if records},
        ended=dict(ended),
        interrupted=frozenset(_key(run, kinds) for run in running if is_orphaned(run)),
    )


def run_seconds(instance: dg.DagsterInstance) -> dict[str, tuple[int, float]]:
    """Round and seconds (creation to end) of the newest successful launches, by run id; no repeated evaluations."""
    kinds = {job: kind for job, kind in kinds_by_job(PLAIN_NAMES).items() if kind != _ANY_ROUND}
    return {
        record.dagster_run.run_id: (
            _key(record.dagster_run, kinds)[1],
            record.end_time - record.create_timestamp.timestamp(),
        )
        for record in instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS]), limit=_TIMED)
        if record.end_time is not None and _is_launch(record.dagster_run, kinds)
    }


def _attempt(run: dg.DagsterRun) -> int:
    """The number of the attempt in a run's key; -1 without such a key."""
    attempt = run.tags.get(_RUN_KEY_TAG, "").rpartition(":")[2]
    return int(attempt) if attempt.isdecimal() else -1


def _successes(instance: dg.DagsterInstance, job: str, limit: int | None) -> list[dg.RunRecord]:
    """The newest successful runs of a job, newest first; all of them without a ``limit``."""
    filters = dg.RunsFilter(job_name=job, statuses=[dg.DagsterRunStatus.SUCCESS])
    records = instance.get_run_records(filters, limit=limit)
    return [record for record in records if _names_a_round(record.dagster_run)]


def _failures(records: list[dg.RunRecord]) -> Failures:
    newest = records[0]
    run = newest.dagster_run
    fault = fault_of(run)
    return Failures(
        count=len(records),
        cause=fault.get(CAUSE_TAG, _SILENT[run.status]),
        retryable=fault.get(RETRYABLE_TAG, "true") == "true",
        ended_at=newest.end_time,
    )


def _is_launch(run: dg.DagsterRun, kinds: Mapping[str, str]) -> bool:
    """Whether the run is a launch of the plan; a run of a partition whose name is not a round is none."""
    return run.job_name in kinds and _names_a_round(run)


def _names_a_round(run: dg.DagsterRun) -> bool:
    return is_round_key(run.tags.get(PARTITION_TAG, round_key(0)))


def _key(run: dg.DagsterRun, kinds: Mapping[str, str]) -> _Key:
    partition = run.tags.get(PARTITION_TAG)
    return kinds[run.job_name], 0 if partition is None else round_number(partition)
