"""Assets of offline data: the dataset of a training, written once, with a digest and the source of every row."""

from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.assets.checks import leak_result, leak_spec
from rft_platform.assets.common import columns_of, path, report_table, round_of
from rft_platform.assets.project_asset import ProjectAsset
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.rounds.project.record import DatasetFile

_SAMPLES = 3


def _dataset(name: str, description: str) -> ProjectAsset:
    """The asset ``name``: the dataset of an offline training."""

    def body(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
        return _write(context, project)

    body.__name__ = name  # ``reports_faults`` reads it
    return ProjectAsset(
        reports_faults(body),
        description=description,
        group_name="tasks",
        kinds={"dataset", "parquet"},
        check_specs=[leak_spec(name, "The dataset contains no held-out task.")],
    )


def _write(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    from rft_platform.rounds.offline_dataset import DESCRIPTIONS, leaked_tasks, load_dataset, make_dataset

    opened = project.open()
    written, dataset = make_dataset(opened, round_of(context)), load_dataset(opened)
    leaks = leaked_tasks(opened, dataset)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": written.rows,
            "dagster/column_schema": columns_of(_schema(written), DESCRIPTIONS),
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
        check_results=[leak_result(leaks)],
    )


def _schema(written: "DatasetFile") -> object:
    import pyarrow.parquet as pq

    return pq.read_schema(written.path)


sft_dataset = _dataset(
    "sft_dataset",
    "Conversations, one per row: demonstrations to imitate, or data for a distillation from a teacher.",
)
preference_pairs = _dataset(
    "preference_pairs", "Pairs of answers to one prompt, the better one first; or answers, each with a label."
)
