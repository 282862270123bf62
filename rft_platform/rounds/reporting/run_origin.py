"""Log the origin of a round's weights to MLflow: the rows that were trained on, and the LoggedModel made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import FIRST_POLICY
from rft_platform.config.schema.buffer import default_name
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.experience.selections import TRAINED_ON, selection_file
from rft_platform.model_registry.run_lineage import (
    WEIGHTS_TAG,
    RunDataset,
    find_model,
    log_dataset,
    log_model,
    set_model_version,
)
from rft_platform.model_registry.tracking import MetricLink, TrainingRun
from rft_platform.rounds.project.policy import Policy
from rft_platform.rounds.project.project import Project
from rft_platform.training.protocol import StepEvent

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

_SHOWN = ("round", "judge_version", "taskset_digest", "source", "source_sha256")  # of the lineage, with the dataset


def log_training(
    project: Project, run: TrainingRun, policy: Policy, origin: Mapping[str, Any], steps: Sequence[StepEvent]
) -> str:
    """Log a training's steps, its rows as a dataset and its checkpoint as a LoggedModel; return the model's id."""
    name = "policy" if policy.name == FIRST_POLICY else policy.name
    tags = {WEIGHTS_TAG: policy.weights_digest, "checkpoint": policy.folder, **_plain(origin)}
    dataset = training_dataset(project, policy, origin)
    if dataset is not None:
        log_dataset(run, dataset)
    model_id = log_model(run, f"{name}-v{policy.policy_version}", policy.policy_version, tags)
    steps = [replace(step, metrics={**step.metrics, "round": float(policy.round)}) for step in steps]
    run.log_steps(steps, result=MetricLink(model_id) if dataset is None else dataset.link(model_id))
    return model_id


def link_version(registry: "ModelRegistry", run: TrainingRun, model_id: str, version: int) -> None:
    """Link a LoggedModel and the model version of its weights by tags of both."""
    set_model_version(run, model_id, registry.model_name, version)
    registry.annotate(version, {"logged_model": model_id})


def training_dataset(project: Project, policy: Policy, origin: Mapping[str, Any]) -> RunDataset | None:
    """The rows behind the weights: those of the round, of its row selection, or of an offline dataset.

    None if the lineage has no digest of them.
    """
    digest, number, store = origin.get("data_digest"), int(origin.get("round") or policy.round), project.store
    if digest is None:
        return None
    selection = origin.get("row_selection")
    if selection is not None:
        source, rows = selection_file(store, number, policy.name), sum(selection["rows"][use] for use in TRAINED_ON)
    elif "dataset" in origin:
        source, rows = store.round_folder(number) / str(origin["dataset"]), int(origin["dataset_rows"])
    else:
        source, rows = store.round_folder(number), store.count_kept(number)
    shown = {name: origin[name] for name in _SHOWN if origin.get(name) is not None}
    return RunDataset(round_key(number), str(digest), source.absolute(), "training", {"num_rows": rows, **shown})


def log_evaluation(
    project: Project, run: TrainingRun, policy: Policy, results: Sequence[EvaluationResult]
) -> list[MetricLink]:
    """Log the held-out tasksets as datasets; return the links of their metrics to datasets and to the LoggedModel."""
    model_id, links = find_model(run, policy.weights_digest), []
    for taskset, result in zip(project.config.buffer.explorer_input.eval_tasksets, results, strict=False):
        source = Path(taskset.path).absolute() if Path(taskset.path).exists() else taskset.path
        name = taskset.name or default_name(taskset.path, taskset.split)
        dataset = RunDataset(name, result.tasks_digest, source, "evaluation", {"num_rows": result.tasks})
        log_dataset(run, dataset)
        links.append(dataset.link(model_id))
    return links


def _plain(origin: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in origin.items() if not isinstance(value, dict) and value is not None}
