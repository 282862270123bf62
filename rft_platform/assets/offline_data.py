"""Assets of offline data: the dataset of a training, written once, with its digest and the source of every row."""

from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.assets.common import OWNERS, columns_of, path, report_table, rft_rounds, round_of
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.rounds.offline_dataset import DatasetFile

_SAMPLES = 3


def _unleaked(asset: str) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec("no_leaks", asset=asset, description="The dataset contains no held-out task.")


@dg.asset(
    partitions_def=rft_rounds,
    group_name="tasks",
    owners=OWNERS,
    kinds={"dataset", "parquet"},
    check_specs=[_unleaked("sft_dataset")],
)
@reports_faults
def sft_dataset(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """Conversations, one per row: demonstrations to imitate, or the data of a distillation from a teacher."""
    return _dataset(context, project)


@dg.asset(
    partitions_def=rft_rounds,
    group_name="tasks",
    owners=OWNERS,
    kinds={"dataset", "parquet"},
    check_specs=[_unleaked("preference_pairs")],
)
@reports_faults
def preference_pairs(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """Pairs of answers to one prompt, the better one first."""
    return _dataset(context, project)


def _dataset(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    from rft_platform.rounds.offline_dataset import leaked_tasks, load_dataset, make_dataset

    opened = project.open()
    written, dataset = make_dataset(opened, round_of(context)), load_dataset(opened)
    leaks = leaked_tasks(opened, dataset)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": written.rows,
            "dagster/column_schema": columns_of(_schema(written)),
            "file": path(written.path),
            "sha256": written.sha256,
            "source": path(written.source),
            "source_files": dg.MetadataValue.json(written.source_files),
            "report": report_table([dataset.report]),
            "left_out": written.report["rows"] - written.rows,
            "leaks": len(leaks),
            "sample": dg.MetadataValue.json(list(dataset.rows[:_SAMPLES])),
        },
        data_version=dg.DataVersion(written.digest),
        check_results=[
            dg.AssetCheckResult(
                check_name="no_leaks",
                passed=not leaks,
                severity=dg.AssetCheckSeverity.WARN,
                metadata={"leaked_prompts": dg.MetadataValue.json([task.prompt for task in leaks[:10]])},
            )
        ],
    )


def _schema(written: "DatasetFile") -> object:
    import pyarrow.parquet as pq

    return pq.read_schema(written.path)
