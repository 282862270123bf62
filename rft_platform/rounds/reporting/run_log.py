"""Log steps, rounds and evaluations to the sinks that ``monitor.monitor_type`` names.

MLflow is always one of them. It also gets what a round's weights come from: the rows, the LoggedModel made of them, and
sampled transcripts. ``mlflow_links`` gives the links from Dagster to MLflow's pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import DEFAULT_POLICY, stored_name
from rft_platform.config.schema.buffer import default_name
from rft_platform.config.schema.evaluation import METRIC_SINKS
from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import POLICY_REWARD
from rft_platform.experience.selections import TRAINED_ON, selection_file
from rft_platform.model_registry.metric_sinks import MetricSink, TensorBoardRun
from rft_platform.model_registry.models import LOGGED_MODEL_TAG, version_tags
from rft_platform.model_registry.otlp_traces import send_traces
from rft_platform.model_registry.pages import version_link
from rft_platform.model_registry.run_traces import GivenFeedback, JudgedTranscript, log_traces
from rft_platform.model_registry.tracking import (
    WEIGHTS_TAG,
    MetricLink,
    RunDataset,
    TrainingRun,
    find_model,
    log_dataset,
    log_model,
    set_model_version,
    system_metrics,
)
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    BY_MODEL,
    Judged,
    Policy,
    RoundRecord,
    Trained,
    all_figures,
    publish,
    required,
)
from rft_platform.rounds.project.traffic_source import TrafficSource
from rft_platform.training.protocol import StepEvent

if TYPE_CHECKING:
    from rft_platform.experience.record import RolloutRow
    from rft_platform.model_registry.models import ModelRegistry


_JUDGED = ["run_id", "step", "reward", "reward_parts", "dropped_by"]
_SHOWN = ("round", "judge_version", "taskset_digest", "source", "source_sha256")  # of the lineage, with the dataset


def monitor_steps(
    project: Project, round_number: int, steps: Sequence[StepEvent], policy: str = DEFAULT_POLICY
) -> None:
    """Write the metrics of a round's optimiser steps to the sinks. If the round is retrained, write them again."""
    for sink in _sinks(project, policy) if steps else ():
        sink.log_steps(f"{round_key(round_number)}-train", steps)


def monitor_round(project: Project, round_number: int, metrics: Mapping[str, Any], prefix: str) -> None:
    """Write the metrics of a round to the sinks, with the round as x axis and ``prefix`` (such as ``eval/``)."""
    for sink in _sinks(project) if metrics else ():
        sink.log_round(f"{round_key(round_number)}-{prefix.strip('/')}", round_number, metrics, prefix)


def _sinks(project: Project, policy: str = DEFAULT_POLICY) -> Iterator[MetricSink]:
    """The destinations that ``monitor.monitor_type`` names beside MLflow; those without their package are left out."""
    monitor, home = project.config.monitor, project.home
    name = stored_name(f"{project.config.project}-{project.config.name}", policy)
    if "tensorboard" in monitor.monitor_type:
        yield TensorBoardRun(Path(monitor.tensorboard_dir) if monitor.tensorboard_dir else home.tensorboard, name)
    points = [point for kind in monitor.plugged for point in entry_points(group=METRIC_SINKS, name=kind)]
    settings = project.config.model_dump(mode="json", exclude_none=True) if points else {}
    for point in points:
        sink = point.load()(home.root / point.name, project.config.project, name, settings)
        if sink is not None:
            yield sink


def scores_of(result: EvaluationResult, differences: Sequence[Comparison]) -> dict[str, float]:
    """The numbers of an evaluation for plots, by name."""
    return {**result.summary(), **{name: value for each in differences for name, value in each.named().items()}}


def record_evaluation(
    project: Project,
    registry: "ModelRegistry",
    policy: Policy,
    scores: Mapping[str, float],
    gate: str | None,
    results: Sequence[EvaluationResult],
) -> None:
    """Record the numbers and the report in MLflow, the sinks and the policies' model versions.

    ``results`` are those of all tasksets, whose metrics are recorded as ``eval/<taskset>/<metric>/mean@n``. With
    ``gate`` None the model version keeps the decision of an earlier evaluation.
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


def record_training(
    project: Project, registry: "ModelRegistry", record: RoundRecord, policy: Policy, trained: Trained
) -> Policy:
    """Log a training's steps and register its checkpoint in MLflow; returns the policy with its model version.

    The lineage of the weights becomes the version's tags. A no-op round registers nothing: ``policy`` then has the
    parent's model version. Each policy has its own model and MLflow run.
    """
    registry = registry.of_policy(policy.name)
    origin, steps = trained.lineage, trained.step_events
    run = registry.training_run(project.config.name, {"rft.config_digest": origin["config_digest"]})
    run.reopen()
    run.log_params(project.config.model_dump(mode="json", exclude_none=True))
    if policy.name == DEFAULT_POLICY:
        judged = all_figures(record.judged) if record.judged else {}
        run.log_round(policy.round, judged, prefix="round/")
        monitor_round(project, policy.round, judged, prefix="round/")
        log_round_traces(project, registry, record)
    if trained.steps == 0:
        return policy
    model_id = log_training(project, run, policy, origin, steps)
    monitor_steps(project, policy.round, steps, policy.name)
    tags = {**version_tags(origin, trained.weights_digest), LOGGED_MODEL_TAG: model_id}
    version = registry.register_checkpoint(Path(policy.folder), policy.policy_version, tags, run.run_id)
    set_model_version(run, model_id, registry.model_name, version)
    registered = replace(policy, model_version=str(version))
    publish(project.store, registered)
    return registered


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
def machine_watched(project: Project, registry: "ModelRegistry", policy: str = DEFAULT_POLICY) -> Iterator[None]:
    """Log the use of the machine to the MLflow run of a policy while the block runs, if the configuration says so."""
    if not project.config.monitor.system_metrics:
        yield
        return
    registry = registry.of_policy(policy)
    run = registry.training_run(project.config.name)
    with system_metrics(run, registry.tracking_uri):
        yield


def finish_runs(project: Project, registry: "ModelRegistry") -> None:
    """Mark the MLflow runs of the project's policies as finished; a further round opens them again."""
    for name in project.policies:
        registry.of_policy(name).training_run(project.config.name).finish()


def mlflow_links(project: Project, registry: "ModelRegistry", policy: Policy) -> dict[str, str]:
    """Links to the MLflow pages of the project's training run and of the policy's model version."""
    links = {"mlflow_run": registry.run_link(project.config.name)}
    if policy.model_version is not None:
        links["mlflow_model"] = version_link(project.model_name, policy.model_version)
    return links


def log_training(
    project: Project, run: TrainingRun, policy: Policy, origin: Mapping[str, Any], steps: Sequence[StepEvent]
) -> str:
    """Log a training's steps, its rows as a dataset and its checkpoint as a LoggedModel; return the model's id."""
    tags = {WEIGHTS_TAG: policy.weights_digest, "checkpoint": policy.folder, **_plain(origin)}
    dataset = training_dataset(project, policy, origin)
    if dataset is not None:
        log_dataset(run, dataset)
    model_id = log_model(run, f"{policy.name}-v{policy.policy_version}", policy.policy_version, tags)
    steps = [replace(step, metrics={**step.metrics, "round": float(policy.round)}) for step in steps]
    run.log_steps(steps, result=MetricLink(model_id) if dataset is None else dataset.link(model_id))
    return model_id


def training_dataset(project: Project, policy: Policy, origin: Mapping[str, Any]) -> RunDataset | None:
    """The rows behind the weights: those of a row selection, or of an offline dataset; None for demonstrations.

    ``origin`` is the lineage of the weights. It may name an earlier round than ``policy``: a round without optimiser
    steps publishes the weights of its parent again.
    """
    number, store, selection = int(origin.get("round") or policy.round), project.store, origin.get("row_selection")
    if selection is not None:
        source, rows = selection_file(store, number, policy.name), sum(selection["rows"][use] for use in TRAINED_ON)
    elif "dataset" in origin:
        source, rows = store.round_folder(number) / str(origin["dataset"]), int(origin["dataset_rows"])
    else:
        return None
    digest = str(origin["data_digest"])
    shown = {name: origin[name] for name in _SHOWN if origin.get(name) is not None}
    return RunDataset(round_key(number), digest, source.absolute(), "training", {"num_rows": rows, **shown})


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


def log_round_traces(project: Project, registry: "ModelRegistry", record: RoundRecord) -> int:
    """Log ``monitor.traces`` runs of a round to MLflow, and send them to the OTLP receiver; return their number."""
    count = project.config.monitor.traces
    if not count:
        return 0
    run, chosen = registry.training_run(project.config.name), transcripts(project, record, count)
    endpoint = project.config.monitor.otlp_endpoint
    if endpoint is not None and project.traffic is None:
        send_traces(endpoint, f"{project.config.project}-{project.config.name}", chosen)
    return log_traces(run, registry.tracking_uri, chosen)


def transcripts(project: Project, record: RoundRecord, count: int) -> list[JudgedTranscript]:
    """Runs of a round in order of their rewards, from the lowest to the highest one, at most ``count``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from rft_platform.experience.schema import table_to_rows

    store, number, version = project.store, record.number, project.store.judge_version(record.number)
    if version is None:
        return []
    judged = {
        row["run_id"]: row
        for row in store.read_judged(number, version, columns=_JUDGED).to_pylist()
        if row["reward"] is not None
    }
    chosen = spread(sorted(judged, key=lambda run_id: (judged[run_id]["reward"], run_id)), count)
    table = store.read_rollouts(number)
    rows = table_to_rows(table.filter(pc.is_in(table["run_id"], pa.array(chosen, pa.string()))))
    traffic = project.traffic
    texts = traffic is None  # of production traffic MLflow gets no messages
    feedback = {} if traffic is None else _feedback(traffic, rows)
    known = record.judged or Judged()
    judge = f"{known.judge_names.get(version, '')} {version}".strip()
    return [
        JudgedTranscript(
            calls=sorted((row for row in rows if row.run_id == run_id), key=lambda row: (row.step, row.row_id)),
            rewards=_rewards(judged[run_id]),
            judge=judge,
            by_model=known.judge_kinds.get(version) == BY_MODEL,
            dropped_by=judged[run_id]["dropped_by"],
            with_texts=texts,
            feedback=feedback.get(run_id, ()),
        )
        for run_id in chosen
    ]


def _feedback(traffic: TrafficSource, rows: Sequence["RolloutRow"]) -> dict[str, list[GivenFeedback]]:
    """What users said about the runs of production traffic, by run; each feedback once."""
    given = traffic.feedback_on(sorted({row.call.msg_id for row in rows}))
    found: dict[str, dict[str, GivenFeedback]] = {}
    for row in rows:
        for each in given.get(row.call.msg_id, ()):
            found.setdefault(row.run_id, {})[each.feedback_id] = each
    return {run_id: list(by_id.values()) for run_id, by_id in found.items()}


def spread(ordered: Sequence[str], count: int) -> list[str]:
    """At most ``count`` items at equal distances, the first and the last one among them."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[round(index * (len(ordered) - 1) / max(count - 1, 1))] for index in range(count)]


def _rewards(judged: dict[str, Any]) -> dict[str, float]:
    parts = {name: value for name, value in judged["reward_parts"] if not name.startswith(POLICY_REWARD)}
    return {**parts, "reward": judged["reward"]}
