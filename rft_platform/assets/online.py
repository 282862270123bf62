"""Assets of online projects: committed production traffic as the rows of a round, corrections as demonstrations.

``release_report`` reports the versions in production, after an optional decision on a version.
"""

from functools import partial
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from rft_platform.assets.common import ProjectAsset, columns_of, numbers, path, report_table, round_of
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import ProjectResource


@partial(
    ProjectAsset,
    group_name="rollouts",
    kinds={"parquet", "sql"},
)
@reports_faults
def online_experiences(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """Model calls of production clients that have a reward from feedback and were committed. Written once."""
    from rft_platform.experience.schema import DESCRIPTIONS, ROLLOUT_SCHEMA
    from rft_platform.rounds.project.record import all_figures
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    explored = Round(opened, number).collect()
    return dg.MaterializeResult(
        metadata={
            "dagster/partition_row_count": explored.rows,
            "dagster/column_schema": columns_of(ROLLOUT_SCHEMA, DESCRIPTIONS),
            "folder": path(opened.store.rollout_files(number)[0].parent),
            **numbers(all_figures(explored)),
        },
        data_version=dg.DataVersion(opened.store.rollouts_digest(number)),
    )


@partial(
    ProjectAsset,
    group_name="rollouts",
    kinds={"parquet", "sql"},
    deps=["online_experiences"],
)
@reports_faults
def online_demonstrations(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """New corrections of users, each used by one round: the messages of a call and the answer that the user wanted."""
    from rft_platform.rounds.round import Round

    found = Round(project.open(), round_of(context)).demonstrations()
    return dg.MaterializeResult(
        metadata={"dagster/partition_row_count": found.rows}, data_version=dg.DataVersion(found.sha256 or "none")
    )


class ReleaseConfig(dg.Config):
    """A decision to make before the report. Versions are policy versions."""

    decision: Literal["none", "promote", "rollback", "canary", "ab"] = Field(
        default="none", description="What to do first; the running service carries it out within a second."
    )
    version: int | None = Field(default=None, description="The policy version; by default the newest or the previous.")
    share: float | None = Field(default=None, description="Share of the traffic of a canary or an A/B test.")
    reason: str = Field(default="launched in Dagster", description="Kept with the decision.")


@partial(
    ProjectAsset,
    group_name="evaluation",
    kinds={"report", "sql"},
    deps=["evaluation_report"],
    each_round=False,
)
@reports_faults
def release_report(
    context: dg.AssetExecutionContext, config: ReleaseConfig, project: ProjectResource
) -> dg.MaterializeResult:
    """Versions in production with their traffic, and the newest canary or A/B test with its p values."""
    from rft_platform.online.releases.versions import release_commands

    commands = release_commands(project.open())
    commands.decide(config.decision, config.version, config.share, config.reason)
    status, newest = commands.status(), commands.store.newest(1)
    metadata: dict[str, Any] = {"traffic": {str(each["version"]): each["traffic"] for each in status["versions"]}}
    if status["serving"] is not None:
        metadata["serving"] = status["serving"]
    if newest:
        metadata |= {"comparison": report_table(commands.comparison(newest[0]).metrics), "result": newest[0].reason}
    return dg.MaterializeResult(metadata=metadata)
