"""Prune Dagster's run history: event logs and captured output of old rounds, and failed runs that were repeated.

For every round the run record, its materializations and its asset checks stay. They are in Dagster's index, and the
interface, the lineage and the plan need them. Removed are the database of a run's event log (SQLite keeps one file of
about a third of a megabyte per run) and its captured output.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from dagster._core.storage.event_log import SqliteEventLogStorage

from rft_platform.experience.rounds import round_number
from rft_platform.jobs.jobs import KIND_OF_JOB

_PARTITION_TAG = "dagster/partition"
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_PAGE = 500  # run records read at once


@dataclass(slots=True)
class Pruned:
    """What was removed; in a dry run, what would be removed."""

    event_logs: int = 0  # of runs whose record stays
    runs: int = 0  # failed runs repeated by a later run of the same round and job
    freed_bytes: int = 0


def prune_run_history(instance: dg.DagsterInstance, *, keep_rounds: int, dry_run: bool) -> Pruned:
    """Prune the runs of all rounds except the newest ``keep_rounds``; runs without a round and open runs stay."""
    runs = [(number, run) for run in _ended_runs(instance) if (number := _round_of(run)) is not None]
    newest = max((number for number, _ in runs), default=0)
    succeeded = {(run.job_name, number) for number, run in runs if run.status == dg.DagsterRunStatus.SUCCESS}
    pruned = Pruned()
    for number, run in runs:
        if number > newest - keep_rounds:
            continue
        log = _event_log(instance, run.run_id)
        size = log.stat().st_size if log is not None and log.exists() else 0
        pruned.freed_bytes += size
        repeated = run.status != dg.DagsterRunStatus.SUCCESS and (run.job_name, number) in succeeded
        pruned.runs += repeated
        pruned.event_logs += size > 0 and not repeated
        if not dry_run:
            _remove(instance, run, log, whole=repeated)
    return pruned


def _remove(instance: dg.DagsterInstance, run: dg.DagsterRun, log: Path | None, whole: bool) -> None:
    instance.compute_log_manager.delete_logs(prefix=[run.run_id])
    if whole:
        instance.delete_run(run.run_id)
    if log is not None:
        for file in (log, log.with_name(f"{log.name}-wal"), log.with_name(f"{log.name}-shm")):
            file.unlink(missing_ok=True)


def _event_log(instance: dg.DagsterInstance, run_id: str) -> Path | None:
    """The database of a run's event log; None if one database holds all of them (Postgres)."""
    storage = instance.event_log_storage
    return Path(storage.path_for_shard(run_id)) if isinstance(storage, SqliteEventLogStorage) else None


def _ended_runs(instance: dg.DagsterInstance) -> Iterator[dg.DagsterRun]:
    """All runs that have ended, newest first."""
    cursor = None
    while records := instance.get_run_records(dg.RunsFilter(statuses=_ENDED), limit=_PAGE, cursor=cursor):
        yield from (record.dagster_run for record in records)
        cursor = records[-1].dagster_run.run_id


def _round_of(run: dg.DagsterRun) -> int | None:
    """The round of a run launched by the plan; None for any other run and for a partition that names no round."""
    partition = run.tags.get(_PARTITION_TAG)
    if run.job_name not in KIND_OF_JOB or partition is None:
        return None
    try:
        return round_number(partition)
    except ValueError:
        return None
