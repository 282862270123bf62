"""Asset of judgement: reward and advantage of every row. Re-runnable with another judge on stored rollouts."""

import dagster as dg
from pydantic import Field

from rft_platform.assets.checks import EXPERIENCE_CHECKS, experience_results
from rft_platform.assets.common import OWNERS, columns_of, numbers, path, rft_rounds, round_of
from rft_platform.resources.project import ProjectResource


class JudgeConfig(dg.Config):
    """Which judge to use for this run."""

    judge: str = Field(
        default="", description="Built-in judge or package.module:function in place of the configured one."
    )


@dg.asset(
    partitions_def=rft_rounds,
    group_name="experiences",
    owners=OWNERS,
    kinds={"parquet", "duckdb"},
    deps=["rollout_batches"],
    check_specs=EXPERIENCE_CHECKS,
)
def judged_experiences(
    context: dg.AssetExecutionContext, config: JudgeConfig, project: ProjectResource
) -> dg.MaterializeResult:
    """Rewards, their parts, advantages and the judge's version, joined to the rollouts by row_id."""
    from rft_platform.experience.schema import JUDGED_SCHEMA
    from rft_platform.rounds.judge import judge, quality, sample_transcripts

    opened, number = project.open(), round_of(context)
    summary = judge(opened, number, config.judge or None)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": summary["rows"],
            "dagster/column_schema": columns_of(JUDGED_SCHEMA),
            "folder": path(opened.store.round_folder(number) / "judged"),
            "judge_version": summary["judge_version"],
            "transcripts": dg.MetadataValue.md(sample_transcripts(opened, number)),
            **numbers(summary),
        },
        data_version=dg.DataVersion(f"{opened.store.digest(number)[:16]}+{summary['judge_version']}"),
        check_results=experience_results(*quality(opened, number, summary["judge_version"])),
    )
