"""Log steps, rounds and evaluations to TensorBoard, if ``monitor.monitor_type`` names it, and evaluations to MLflow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.model_registry.tensorboard import TensorBoardRun
from rft_platform.rounds.project.policy import Policy, ended_with
from rft_platform.rounds.project.project import Project
from rft_platform.training.protocol import StepEvent

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


def monitor_steps(project: Project, round_number: int, steps: Sequence[StepEvent], policy: str | None = None) -> None:
    """Write the metrics of a round's optimiser steps. A retrained round is written again."""
    run = _tensorboard(project, policy)
    if run is not None and steps:
        run.log_steps(f"{round_key(round_number)}-train", steps)


def monitor_round(project: Project, round_number: int, metrics: Mapping[str, Any], prefix: str) -> None:
    """Write the metrics of a round, with the round as x axis. ``prefix`` (such as ``eval/``) names the part."""
    run = _tensorboard(project)
    if run is not None and metrics:
        run.log_round(f"{round_key(round_number)}-{prefix.strip('/')}", round_number, metrics, prefix)


def _tensorboard(project: Project, policy: str | None = None) -> TensorBoardRun | None:
    if "tensorboard" not in project.config.monitor.monitor_type:
        return None
    given = project.config.monitor.tensorboard_dir
    folder = Path(given) if given else project.home.tensorboard
    of_policy = "" if policy is None else f"-{policy}"
    return TensorBoardRun(folder, f"{project.config.project}-{project.config.name}{of_policy}")


def scores_of(result: EvaluationResult, differences: Sequence[Comparison]) -> dict[str, float]:
    """The numbers of an evaluation that are plotted, by name."""
    return {**result.summary(), **{name: value for each in differences for name, value in each.named().items()}}


def record_evaluation(
    project: Project, registry: "ModelRegistry", policy: Policy, scores: Mapping[str, float], gate: str
) -> None:
    """Record the numbers and the report in MLflow, TensorBoard and the model version."""
    run = registry.training_run(project.config.name)
    run.log_round(policy.round, scores, prefix="eval/")
    monitor_round(project, policy.round, scores, prefix="eval/")
    for name in ("report.md", "learning_curve.png"):
        file = project.store.round_folder(policy.round) / name
        if file.exists():
            run.log_artifact(file, f"round-{policy.round:04d}")
    if policy.model_version is not None:
        passes = {name: scores.get(name) for name in ("sampled_pass", "greedy_pass")}
        registry.annotate(int(policy.model_version), {"gate": gate, **passes})
    annotate_further(project, registry, policy.round, scores)


def annotate_further(project: Project, registry: "ModelRegistry", round_number: int, scores: Mapping[str, Any]) -> None:
    """Add the scores of a round's evaluation to the model versions of the further policies that took part."""
    for name, policy in ended_with(project, round_number).items():
        if policy.model_version is not None:
            registry.sibling(name).annotate(int(policy.model_version), scores)
