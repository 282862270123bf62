"""Log steps, rounds and evaluations to the sinks that ``monitor.monitor_type`` names, and evaluations to MLflow.

``mlflow_links`` gives the links from Dagster to MLflow's pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import FIRST_POLICY, stored_name
from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.model_registry.pages import version_link
from rft_platform.model_registry.sinks.metric_sink import MetricSink
from rft_platform.model_registry.system_metrics import system_metrics
from rft_platform.rounds.project.policy import Policy, required
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.run_origin import log_evaluation
from rft_platform.training.protocol import StepEvent

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


def monitor_steps(project: Project, round_number: int, steps: Sequence[StepEvent], policy: str = FIRST_POLICY) -> None:
    """Write the metrics of a round's optimiser steps to the sinks. If the round is retrained, write them again."""
    for sink in _sinks(project, policy) if steps else ():
        sink.log_steps(f"{round_key(round_number)}-train", steps)


def monitor_round(project: Project, round_number: int, metrics: Mapping[str, Any], prefix: str) -> None:
    """Write the metrics of a round to the sinks, with the round as x axis and ``prefix`` (such as ``eval/``)."""
    for sink in _sinks(project) if metrics else ():
        sink.log_round(f"{round_key(round_number)}-{prefix.strip('/')}", round_number, metrics, prefix)


def _sinks(project: Project, policy: str = FIRST_POLICY) -> Iterator[MetricSink]:
    """The destinations that ``monitor.monitor_type`` names beside MLflow; those without their package are left out."""
    monitor, home = project.config.monitor, project.home
    name = stored_name(f"{project.config.project}-{project.config.name}", policy)
    if "tensorboard" in monitor.monitor_type:
        from rft_platform.model_registry.sinks.tensorboard import TensorBoardRun

        yield TensorBoardRun(Path(monitor.tensorboard_dir) if monitor.tensorboard_dir else home.tensorboard, name)
    services = [service for service in monitor.services if find_spec(service) is not None]
    settings = project.config.model_dump(mode="json", exclude_none=True) if services else {}
    if "wandb" in services:
        from rft_platform.model_registry.sinks.wandb_run import WandbRun

        yield WandbRun.of(home.root / "wandb", project.config.project, name, settings)
    if "swanlab" in services:
        from rft_platform.model_registry.sinks.swanlab_run import SwanlabRun

        yield SwanlabRun.of(home.root / "swanlab", project.config.project, name, settings)


def scores_of(result: EvaluationResult, differences: Sequence[Comparison]) -> dict[str, float]:
    """The numbers of an evaluation for plots, by name."""
    return {**result.summary(), **{name: value for each in differences for name, value in each.named().items()}}


def record_evaluation(
    project: Project,
    registry: "ModelRegistry",
    policy: Policy,
    scores: Mapping[str, float],
    gate: str,
    results: Sequence[EvaluationResult],
) -> None:
    """Record the numbers and the report in MLflow, the sinks and the policies' model versions.

    ``results`` are those of all tasksets, whose metrics are recorded as ``eval/<taskset>/<metric>/mean@n``.
    """
    run = registry.training_run(project.config.name)
    if project.config.group:
        run.set_tags({"rft.group": project.config.group})
    links = log_evaluation(project, run, policy, results)
    of_first = {**(_metrics_of(results[0]) if results else {}), **scores}
    run.log_round(policy.round, charted(of_first), prefix="eval/", link=links[0] if links else None)
    for result, link in zip(results[1:], links[1:], strict=False):
        run.log_round(policy.round, charted(_metrics_of(result)), prefix="eval/", link=link)
    every = {name: value for result in results for name, value in _metrics_of(result).items()}
    monitor_round(project, policy.round, charted(every | dict(scores)), prefix="eval/")
    for name in ("report.md", "learning_curve.png"):
        file = project.store.round_folder(policy.round) / name
        if file.exists():
            run.log_artifact(file, f"round-{policy.round:04d}")
    if policy.model_version is not None:
        passes = {name: scores.get(name) for name in ("sampled_pass", "greedy_pass")}
        registry.annotate(int(policy.model_version), {"gate": gate, **passes})
    for name in project.policies:
        other = policy if name == policy.name else required(project.store, policy.round, name)
        if other is not policy and other.model_version is not None:
            registry.of_policy(name).annotate(int(other.model_version), scores)


def charted(scores: Mapping[str, float]) -> dict[str, float]:
    """``scores`` under the names of their charts, which tools group by the part before the last slash.

    The bounds of intervals and the counts of incomplete runs get groups of their own, so that the scores come first.
    """
    return {_chart_of(name): value for name, value in scores.items()}


def _chart_of(name: str) -> str:
    if name.endswith(("_low", "_high")):
        return f"interval/{name}"
    return f"incomplete/{name}" if name in ("failed_runs", "truncated_share") else name


def _metrics_of(result: EvaluationResult) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in result.metrics.items()}


@contextmanager
def machine_watched(project: Project, registry: "ModelRegistry", policy: str = FIRST_POLICY) -> Iterator[None]:
    """Log the use of the machine to the MLflow run of a policy while the block runs, if the configuration says so."""
    if not project.config.monitor.system_metrics:
        yield
        return
    registry = registry.of_policy(policy)
    run = registry.training_run(stored_name(project.config.name, policy))
    with system_metrics(run, registry.tracking_uri):
        yield


def finish_runs(project: Project, registry: "ModelRegistry") -> None:
    """Mark the MLflow runs of the project's policies as finished; a further round opens them again."""
    for name in project.policies:
        registry.of_policy(name).training_run(stored_name(project.config.name, name)).finish()


def mlflow_links(project: Project, registry: "ModelRegistry", policy: Policy) -> dict[str, str]:
    """Links to the MLflow pages of the project's training run and of the policy's model version."""
    links = {"mlflow_run": registry.run_link(project.config.name)}
    if policy.model_version is not None:
        links["mlflow_model"] = version_link(project.model_name, policy.model_version)
    return links
