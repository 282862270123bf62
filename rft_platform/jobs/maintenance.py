"""Maintenance jobs for the UI, a schedule or `dagster job launch`: compact the store, retire rounds, prune old runs.

Pruning Dagster's run history removes failed runs that were repeated. For the runs of old rounds it removes the event
log (SQLite keeps one file of about a third of a megabyte per run) and the captured output. It keeps the run record of
every round, its materializations and its asset checks, because the interface, the lineage and the plan need them; they
are in Dagster's index.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg
from pydantic import Field

from rft_platform.assets.run_failure import reports_faults
from rft_platform.common.errors import StorageError
from rft_platform.experience.file_names import round_number
from rft_platform.jobs.dagster_internals.masked_instance import event_log_file
from rft_platform.jobs.jobs import kinds_by_job
from rft_platform.resources.names import PARTITION_TAG, PLAIN_NAMES, DagsterNames
from rft_platform.resources.project import ProjectResource, RegistryResource

_TAGS = {"rft/phase": "maintenance"}
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_PAGE = 500  # run records read at once


class CompactionConfig(dg.Config):
    """Which rounds to compact."""

    keep_last: int = Field(default=2, ge=0, description="Number of newest closed rounds to leave unchanged.")
    grace_s: float = Field(
        default=3600.0, ge=0, description="Seconds to keep replaced files for readers that still use them."
    )
    dry_run: bool = Field(default=False, description="Change nothing; report what would be done.")


class RetentionConfig(dg.Config):
    """Which rounds keep their rollouts, and what happens to the others."""

    keep_last: int | None = Field(default=None, description="Number of newest closed rounds to keep.")
    older_than_days: float | None = Field(default=None, description="Keep rounds younger than this.")
    archive: str = Field(default="", description="Folder to copy the rollouts to first; empty: they are deleted.")
    champion_too: bool = Field(default=False, description="Also retire rounds that the champion was trained on.")
    grace_s: float = Field(
        default=3600.0, ge=0, description="Seconds to keep retired files for readers that still use them."
    )
    dry_run: bool = Field(
        default=True, description="Change nothing, only report what would be done; set it to false to do it."
    )


class HistoryConfig(dg.Config):
    """Which Dagster runs keep their event log."""

    keep_rounds: int = Field(
        default=200, ge=1, description="Number of newest rounds whose runs keep event log and output."
    )
    dry_run: bool = Field(
        default=True, description="Change nothing, only report what would be done; set it to false to do it."
    )


def compact_store(context: dg.OpExecutionContext, config: CompactionConfig, project: ProjectResource) -> None:
    """Compact the store and report the result. If a round could not be compacted, fail after processing all rounds."""
    from rft_platform.rounds.maintenance.store_maintenance import compact

    report = compact(project.open(), keep_last=config.keep_last, grace_s=config.grace_s, dry_run=config.dry_run)
    _report(context, report.problems, {
        "rounds": len(report.rewrites),
        "files_before": sum(len(rewrite.replaced) for rewrite in report.rewrites),
        "rows": sum(rewrite.rows for rewrite in report.rewrites),
        "freed_bytes": report.freed_bytes,
        "dry_run": config.dry_run,
    })  # fmt: skip


def retire_rounds(
    context: dg.OpExecutionContext, config: RetentionConfig, project: ProjectResource, registry: RegistryResource
) -> None:
    """Retire old rounds and report the result. If a round could not be retired, fail after processing all rounds."""
    from rft_platform.rounds.maintenance.store_maintenance import retain

    opened = project.open()
    report = retain(
        opened,
        registry.connect(opened),
        keep_last=config.keep_last,
        older_than_days=config.older_than_days,
        archive=Path(config.archive) if config.archive else None,
        champion_too=config.champion_too,
        grace_s=config.grace_s,
        dry_run=config.dry_run,
    )
    _report(context, report.problems, {
        "rounds": len(report.retirements),
        "rows": sum(retired.rows for retired in report.retirements),
        "bytes": sum(retired.bytes for retired in report.retirements),
        "kept_for_champion": len(report.protected),
        "freed_bytes": report.freed_bytes,
        "dry_run": config.dry_run,
    })  # fmt: skip


def _prune_runs(context: dg.OpExecutionContext, config: HistoryConfig, names: DagsterNames) -> None:
    """Prune Dagster's run history and report the result; materializations, checks and run records stay."""
    pruned = prune_run_history(context.instance, keep_rounds=config.keep_rounds, dry_run=config.dry_run, names=names)
    _report(context, [], {**asdict(pruned), "dry_run": config.dry_run})


def _report(context: dg.OpExecutionContext, problems: list[str], metadata: dict[str, int | bool]) -> None:
    context.log.info(", ".join(f"{name} {value}" for name, value in metadata.items()))
    context.add_output_metadata(metadata)
    if problems:
        raise StorageError("some rounds were not changed: " + "; ".join(problems))


def maintenance_jobs(names: DagsterNames) -> list[dg.JobDefinition]:
    """The jobs ``compact_job`` and ``retention_job`` of a project."""

    def prune_runs(context: dg.OpExecutionContext, config: HistoryConfig) -> None:
        _prune_runs(context, config, names)

    compact = _op(names, "compact_store", compact_store, "Merge the rollout files of closed rounds.")
    retire = _op(names, "retire_rounds", retire_rounds, "Retire the rollouts of old rounds.")
    prune = _op(names, "prune_runs", prune_runs, "Remove event logs and captured output of old runs.")
    return [
        _job(names, "compact_job", [compact], "Merge the explore batches of closed rounds into one file a round."),
        _job(
            names,
            "retention_job",
            [retire, prune],
            "Delete or archive the rollouts of old rounds and prune Dagster's run history; a dry run by default.",
        ),
    ]


def _op(names: DagsterNames, name: str, body: Callable[..., None], description: str) -> dg.OpDefinition:
    bound = names.bound(reports_faults(body))
    return dg.op(name=names.name(name), description=description, out=dg.Out(dg.Nothing))(bound)


def _job(names: DagsterNames, name: str, ops: Sequence[dg.OpDefinition], description: str) -> dg.JobDefinition:
    graph = dg.GraphDefinition(names.name(name), node_defs=ops)
    return graph.to_job(tags=_TAGS, description=description, executor_def=dg.in_process_executor)


@dataclass(slots=True)
class Pruned:
    """Numbers of the things that were removed, or in a dry run would be removed."""

    event_logs: int = 0  # event logs of runs whose record stays
    runs: int = 0  # failed runs repeated by a later run of the same round and job
    freed_bytes: int = 0


def prune_run_history(
    instance: dg.DagsterInstance, *, keep_rounds: int, dry_run: bool, names: DagsterNames = PLAIN_NAMES
) -> Pruned:
    """Prune the runs of all rounds except the newest ``keep_rounds``; runs without a round and open runs stay.

    The newest round is the newest one with a successful run: a failed run may name a round that does not exist.
    """
    jobs = kinds_by_job(names)
    runs = [(number, run) for run in _ended_runs(instance) if (number := _round_of(run, jobs)) is not None]
    newest = max((number for number, run in runs if run.status == dg.DagsterRunStatus.SUCCESS), default=0)
    pruned, succeeded = Pruned(), set()
    for number, run in runs:
        if run.status == dg.DagsterRunStatus.SUCCESS:
            succeeded.add((run.job_name, number))
        if number > newest - keep_rounds:
            continue
        log = event_log_file(instance, run.run_id)
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


def _ended_runs(instance: dg.DagsterInstance) -> Iterator[dg.DagsterRun]:
    """All runs that have ended, newest first."""
    cursor = None
    while records := instance.get_run_records(dg.RunsFilter(statuses=_ENDED), limit=_PAGE, cursor=cursor):
        yield from (record.dagster_run for record in records)
        cursor = records[-1].dagster_run.run_id


def _round_of(run: dg.DagsterRun, jobs: Collection[str]) -> int | None:
    """The round of a run launched by the plan; None for any other run and for a partition that names no round."""
    partition = run.tags.get(PARTITION_TAG)
    if run.job_name not in jobs or partition is None:
        return None
    try:
        return round_number(partition)
    except ValueError:
        return None
