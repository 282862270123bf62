"""Lineage of a training run in MLflow: the datasets that it read and a LoggedModel for each checkpoint that it made.

A LoggedModel is linked to its run as an output, and to the datasets by its metrics: those of its last optimiser step
were measured on the rows of the round, those of its evaluation on held-out tasks. It has no files: the weights are
those of the model version that its tags name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rft_platform.model_registry.tracking import MetricLink, TrainingRun

WEIGHTS_TAG = "weights_digest"
VERSION_TAG = "model_version"
_DIGEST_LIMIT = 36  # characters that MLflow accepts
_CONTEXT = "mlflow.data.context"


@dataclass(frozen=True, slots=True)
class RunDataset:
    """Data that a run read: rows that it trained on, or tasks of an evaluation."""

    name: str
    digest: str
    source: Path | str
    context: Literal["training", "evaluation"]
    profile: Mapping[str, Any]  # plain values, shown with the dataset

    def link(self, model_id: str | None = None) -> MetricLink:
        """Link metrics to this dataset and to a LoggedModel."""
        return MetricLink(model_id, self.name, self.digest[:_DIGEST_LIMIT])


def log_dataset(run: TrainingRun, dataset: RunDataset) -> None:
    """Add a dataset to the inputs of a run. MLflow stores an equal dataset only once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(
        name=dataset.name,
        digest=dataset.digest[:_DIGEST_LIMIT],
        source_type="local",
        source=json.dumps({"uri": str(dataset.source)}),
        profile=json.dumps({**dataset.profile, "digest": dataset.digest}),
    )
    run.client.log_inputs(run.run_id, [DatasetInput(entity, [InputTag(_CONTEXT, dataset.context)])])


def log_model(run: TrainingRun, name: str, step: int, tags: Mapping[str, Any]) -> str:
    """Create the LoggedModel of a checkpoint as an output of the run at an optimiser step; return its id.

    ``tags`` must contain ``weights_digest``: the same run with the same weights always has the same LoggedModel.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    given = {key: str(value) for key, value in tags.items() if value is not None}
    known = find_model(run, given[WEIGHTS_TAG])
    if known is None:
        made = run.client.create_logged_model(run.experiment_id, name, run.run_id, given, model_type="policy")
    model_id = str(made.model_id) if known is None else known
    run.client.finalize_logged_model(model_id, LoggedModelStatus.READY)  # again if a kill interrupted the first time
    outputs = None if known is None else run.client.get_run(run.run_id).outputs
    if outputs is None or model_id not in {output.model_id for output in outputs.model_outputs}:
        run.client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])
    return model_id


def set_model_version(run: TrainingRun, model_id: str, name: str, version: int) -> None:
    """Name the model version of a LoggedModel's weights in its tags."""
    run.client.set_logged_model_tags(model_id, {"registered_model": name, VERSION_TAG: str(version)})


def find_model(run: TrainingRun, weights_digest: str) -> str | None:
    """The id of the run's LoggedModel with these weights, or None."""
    condition = f"tags.`{WEIGHTS_TAG}` = '{weights_digest}' AND source_run_id = '{run.run_id}'"
    found = run.client.search_logged_models([run.experiment_id], condition, max_results=1)
    return str(found[0].model_id) if found else None
