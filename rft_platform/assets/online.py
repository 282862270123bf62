"""Assets of online projects: committed production traffic as the rows of a round, corrections as demonstrations."""

from functools import partial

import dagster as dg

from rft_platform.assets.common import columns_of, numbers, path, round_of
from rft_platform.assets.project_asset import ProjectAsset
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
