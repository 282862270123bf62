"""Exploration asset: the policy's rollouts on a round's tasks, one row per model call."""

from functools import partial

import dagster as dg

from rft_platform.assets.common import ENGINE_POOL, columns_of, numbers, path, round_of
from rft_platform.assets.project_asset import ProjectAsset
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import EngineResource, ProjectResource


@partial(
    ProjectAsset,
    group_name="rollouts",
    kinds={"parquet", "vllm"},
    deps=["policy_snapshot", "task_dataset"],
    pool=ENGINE_POOL,
)
@reports_faults
def rollout_batches(
    context: dg.AssetExecutionContext, project: ProjectResource, engine: EngineResource
) -> dg.MaterializeResult:
    """Runs of the workflow on this round's tasks: token ids, rollout log-probs, messages. Written once."""
    from rft_platform.experience.schema import DESCRIPTIONS, ROLLOUT_SCHEMA
    from rft_platform.rounds.project.record import all_figures
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    explored = Round(opened, number).explore(engine.connect())
    return dg.MaterializeResult(
        metadata={
            "dagster/partition_row_count": explored.rows,
            "dagster/column_schema": columns_of(ROLLOUT_SCHEMA, DESCRIPTIONS),
            "folder": path(opened.store.rollout_files(number)[0].parent),
            **numbers(all_figures(explored)),
            **numbers(explored.task_selection.statistics if explored.task_selection else {}),
        },
        data_version=dg.DataVersion(opened.store.rollouts_digest(number)),
    )
