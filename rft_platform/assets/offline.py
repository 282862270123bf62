"""Assets of offline training: the dataset, and weights trained on demonstrations, preferences or a teacher.

The dataset is written once, with a digest and the source of every row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.assets.checks import checkpoint_specs, leak_result, leak_spec, offline_results
from rft_platform.assets.common import (
    OWNERS,
    TRAINER_POOL,
    ProjectAsset,
    columns_of,
    links,
    numbers,
    path,
    report_table,
    round_of,
    value_table,
)
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import ProjectResource, RegistryResource, TrainerResource

if TYPE_CHECKING:
    from rft_platform.config.resolve import OfflineKind
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
        deps=["imported_traces"],
        check_specs=[leak_spec(name, "The dataset contains no held-out task.")],
    )


def _write(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    from rft_platform.rounds.offline import DESCRIPTIONS, leaked_tasks, load_dataset, make_dataset

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
            "sample": dg.MetadataValue.json([] if any(dataset.origins) else list(dataset.rows[:_SAMPLES])),
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


teacher_model = dg.AssetSpec(
    "teacher_model",
    description="The model that a distillation learns from: a folder, a Hugging Face name or a registered version.",
    group_name="policy",
    owners=OWNERS,
    kinds={"huggingface"},
)


def _checkpoint(name: str, kind: "OfflineKind", deps: Sequence[str], description: str) -> ProjectAsset:
    """The asset ``name``: the weights of an offline training of ``kind`` on the data of the assets ``deps``."""

    def body(
        context: dg.AssetExecutionContext,
        project: ProjectResource,
        trainer: TrainerResource,
        registry: RegistryResource,
    ) -> dg.MaterializeResult:
        return _train(context, kind, project, trainer, registry)

    body.__name__ = name  # ``reports_faults`` reads it
    return ProjectAsset(
        reports_faults(body),
        description=description,
        group_name="training",
        kinds={"pytorch", "safetensors", "mlflow"},
        deps=deps,
        pool=TRAINER_POOL,
        check_specs=checkpoint_specs(name),
    )


def _train(
    context: dg.AssetExecutionContext,
    kind: "OfflineKind",
    project: ProjectResource,
    trainer: TrainerResource,
    registry: RegistryResource,
) -> dg.MaterializeResult:
    from rft_platform.rounds.offline import check_kind, start_training, train_offline
    from rft_platform.rounds.project.record import read
    from rft_platform.rounds.reporting.run_log import mlflow_links, record_training

    opened, number, run_id = project.open(), round_of(context), context.run.run_id
    check_kind(opened, kind, number)
    start_training(opened)
    made, trained = train_offline(opened, trainer.connect(opened), kind, number, run_id)
    versions = registry.connect(opened)
    policy = record_training(opened, versions, read(opened.store, number), made, trained)
    return dg.MaterializeResult(
        metadata={
            "checkpoint": path(policy.folder),
            "policy_version": policy.policy_version,
            "model_version": policy.model_version or "not registered",
            **links(mlflow_links(opened, versions, policy)),
            "optimizer_steps": trained.steps,
            "dataset_rows": trained.lineage["dataset_rows"],
            "data_digest": trained.lineage["data_digest"],
            **numbers(trained.metrics),
            "seconds": value_table(numbers(trained.seconds)),
        },
        data_version=dg.DataVersion(policy.weights_digest),
        check_results=offline_results(trained.step_events),
    )


sft_checkpoint = _checkpoint(
    "sft_checkpoint",
    "sft",
    ["base_model", "sft_dataset"],
    "Weights after supervised fine-tuning on demonstrations, registered as a model version.",
)
dpo_checkpoint = _checkpoint(
    "dpo_checkpoint",
    "dpo",
    ["base_model", "preference_pairs"],
    "Weights after direct preference optimisation against the base model, registered as a model version.",
)
distilled_checkpoint = _checkpoint(
    "distilled_checkpoint",
    "distill",
    ["base_model", "teacher_model", "sft_dataset"],
    "Weights after learning the teacher's distribution on a dataset, registered as a model version.",
)
