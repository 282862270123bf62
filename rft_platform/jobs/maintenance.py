"""Store maintenance jobs (compaction and retention) for the UI, a schedule or `dagster job launch`."""

from dataclasses import asdict
from pathlib import Path

import dagster as dg
from pydantic import Field

from rft_platform.resources.project import ProjectResource
from rft_platform.resources.registry import RegistryResource

_TAGS = {"rft/phase": "maintenance"}


class CompactionConfig(dg.Config):
    """Which rounds to compact."""

    keep_last: int = Field(default=2, ge=0, description="Newest closed rounds that are left as they are.")
    grace_s: float = Field(default=3600.0, ge=0, description="Seconds that replaced files stay for late readers.")
    dry_run: bool = Field(default=False, description="Only say what would be done.")


class RetentionConfig(dg.Config):
    """Which rounds keep their rollouts, and what happens to the others."""

    keep_last: int | None = Field(default=None, description="Newest closed rounds to keep.")
    older_than_days: float | None = Field(default=None, description="Keep rounds younger than this.")
    archive: str = Field(default="", description="Folder to copy the rollouts to first; empty: they are deleted.")
    champion_too: bool = Field(default=False, description="Retire rounds that the champion was trained on as well.")
    grace_s: float = Field(default=3600.0, ge=0, description="Seconds that retired files stay for late readers.")
    dry_run: bool = Field(default=True, description="Only say what would be done; set it to false to do it.")


class HistoryConfig(dg.Config):
    """Which Dagster runs keep their event log."""

    keep_rounds: int = Field(default=200, ge=1, description="Newest rounds whose runs keep event log and output.")
    dry_run: bool = Field(default=True, description="Only say what would be done; set it to false to do it.")


@dg.op(description="Merge the rollout files of closed rounds.", out=dg.Out(dg.Nothing))
def compact_store(context: dg.OpExecutionContext, config: CompactionConfig, project: ProjectResource) -> None:
    """Compact the store and report it. If a round could not be compacted, fails after processing all rounds."""
    from rft_platform.rounds.maintenance import compact

    report = compact(project.open(), keep_last=config.keep_last, grace_s=config.grace_s, dry_run=config.dry_run)
    _tell(context, report.problems, {
        "rounds": len(report.rewrites),
        "files_before": sum(len(rewrite.replaced) for rewrite in report.rewrites),
        "rows": sum(rewrite.rows for rewrite in report.rewrites),
        "freed_bytes": report.freed_bytes,
        "dry_run": config.dry_run,
    })  # fmt: skip


@dg.op(description="Retire the rollouts of old rounds.", out=dg.Out(dg.Nothing))
def retire_rounds(
    context: dg.OpExecutionContext, config: RetentionConfig, project: ProjectResource, registry: RegistryResource
) -> None:
    """Apply the retention and report it. If a round could not be retired, fails after processing all rounds."""
    from rft_platform.rounds.maintenance import retain

    report = retain(
        project.open(),
        registry.connect(),
        keep_last=config.keep_last,
        older_than_days=config.older_than_days,
        archive=Path(config.archive) if config.archive else None,
        champion_too=config.champion_too,
        grace_s=config.grace_s,
        dry_run=config.dry_run,
    )
    _tell(context, report.problems, {
        "rounds": len(report.retirements),
        "rows": sum(retired.rows for retired in report.retirements),
        "bytes": sum(retired.bytes for retired in report.retirements),
        "kept_for_champion": len(report.protected),
        "freed_bytes": report.freed_bytes,
        "dry_run": config.dry_run,
    })  # fmt: skip


@dg.op(description="Remove event logs and captured output of old runs.", out=dg.Out(dg.Nothing))
def prune_runs(context: dg.OpExecutionContext, config: HistoryConfig) -> None:
    """Prune Dagster's run history and report it; materializations, checks and run records stay."""
    from rft_platform.jobs.run_history import prune_run_history

    pruned = prune_run_history(context.instance, keep_rounds=config.keep_rounds, dry_run=config.dry_run)
    _tell(context, [], {**asdict(pruned), "dry_run": config.dry_run})


def _tell(context: dg.OpExecutionContext, problems: list[str], metadata: dict[str, int | bool]) -> None:
    context.log.info(", ".join(f"{name} {value}" for name, value in metadata.items()))
    context.add_output_metadata(metadata)
    if problems:
        raise dg.Failure("some rounds were left as they are:\n" + "\n".join(problems), allow_retries=False)


@dg.job(tags=_TAGS, description="Merge the explore batches of closed rounds into one file a round.")
def compact_job() -> None:
    compact_store()


@dg.job(
    tags=_TAGS,
    description="Delete or archive the rollouts of old rounds and prune Dagster's run history; a dry run by default.",
)
def retention_job() -> None:
    retire_rounds()
    prune_runs()


MAINTENANCE_JOBS = [compact_job, retention_job]
