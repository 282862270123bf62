"""Evaluation of a round: the engine takes the new weights, held-out tasks are run, the gate decides on promotion."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from rft_platform.evaluation.gate import GateDecision, gate
from rft_platform.evaluation.plots import learning_curve
from rft_platform.evaluation.report import data_uri, markdown_report, write_report
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.inference.interface import PolicyEngine
from rft_platform.registry.models import DIGEST_TAG
from rft_platform.rounds.curve import EVALUATION, curve_points, evaluation_of, evaluation_of_weights
from rft_platform.rounds.measure import measure
from rft_platform.rounds.mend import mending
from rft_platform.rounds.monitor import monitor_round
from rft_platform.rounds.policy import Policy, deploy, required
from rft_platform.rounds.project import Project
from rft_platform.rounds.thinning import thin_checkpoints

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry, RegisteredModel


@dataclass(frozen=True, slots=True)
class RoundEvaluation:
    """What came of a round's evaluation; without ``results`` none was due."""

    gate: str
    promoted: bool = False
    results: list[EvaluationResult] = field(default_factory=list)
    markdown: str = ""
    picture: Path | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def evaluate_round(
    project: Project, engine: PolicyEngine, registry: "ModelRegistry", round_number: int, force: bool = False
) -> RoundEvaluation:
    """Serve the round's policy; where an evaluation is due, or forced, measure it and promote it if it passes."""
    started = perf_counter()
    policy = required(project.store, round_number)
    with mending(project, policy):
        canary_delta = deploy(engine, policy)
    seconds = {"deploy_s": perf_counter() - started}
    cpu = process_time() + engine.status().cpu_seconds
    if project.eval_tasks and (force or is_due(project, round_number)):
        outcome = _evaluate(project, engine, registry, policy)
    elif (known := project.store.read_note(round_number, EVALUATION)) is not None and known["results"]:
        return RoundEvaluation(known["gate"], known["promoted"], metrics=known["metrics"])  # measured before: it stands
    else:
        outcome = RoundEvaluation("not due in this round")
    seconds["evaluation_s"] = perf_counter() - started - seconds["deploy_s"]
    seconds["evaluation_cpu_s"] = process_time() + engine.status().cpu_seconds - cpu
    canary = {} if canary_delta is None else {"canary_delta": canary_delta}
    outcome = replace(outcome, metrics={**outcome.metrics, **canary, **seconds})
    note = {
        "results": [result.to_json() for result in outcome.results],
        "gate": outcome.gate,
        "promoted": outcome.promoted,
        "metrics": outcome.metrics,
    }
    project.store.write_note(round_number, EVALUATION, note)
    thin_checkpoints(project, registry)
    return outcome


def is_due(project: Project, round_number: int) -> bool:
    """Whether the configuration wants this round evaluated; the last round always is."""
    if round_number == 0:
        return project.config.explorer.eval_on_startup
    return round_number % project.config.evaluation.every == 0 or round_number == project.rounds_budget


def _evaluate(project: Project, engine: PolicyEngine, registry: "ModelRegistry", policy: Policy) -> RoundEvaluation:
    results = measure(project, engine, policy.round)
    first = results[0]
    champion, decision = against_champion(project, registry, policy, first)
    promoted = decision.passed and policy.model_version is not None
    points = curve_points(project.store, policy.round, first)
    best = policy.round if promoted else None if champion is None else champion.round
    png = learning_curve(points, f"{project.config.project} / {project.config.name}", best)

    def page(picture: str) -> str:
        return markdown_report(
            first,
            title=project.config.project,
            picture=picture,
            start=evaluation_of(project.store, 0),
            champion=champion,
            decision=decision,
        )

    written = write_report(project.store.round_folder(policy.round), page, png)
    metrics = {**first.summary(), **{name: value for result in results for name, value in result.metrics.items()}}
    run = registry.training_run(project.config.name)
    run.log_round(policy.round, first.summary(), prefix="eval/")
    monitor_round(project, policy.round, first.summary(), prefix="eval/")
    picture = written.with_name("learning_curve.png")
    for artifact in (written, picture):
        run.log_artifact(artifact, f"round-{policy.round:04d}")
    if policy.model_version is not None:
        scores = {name: first.value(name) for name in ("sampled_pass", "greedy_pass")}
        registry.annotate(int(policy.model_version), {"gate": decision.reason, **scores})
        if promoted:
            registry.promote(int(policy.model_version))
    return RoundEvaluation(decision.reason, promoted, results, page(data_uri(png)), picture, metrics)


def against_champion(
    project: Project, registry: "ModelRegistry", policy: Policy, result: EvaluationResult
) -> tuple[EvaluationResult | None, GateDecision]:
    """The champion's own evaluation, if it is known here, and the gate's decision.

    Weights are known by their digest: projects that share a server may share policy versions, even a model's name.
    """
    settings = project.config.evaluation.gate
    champion = registry.champion()
    digest = None if champion is None else champion.tags.get(DIGEST_TAG, "")
    if digest is None or digest == policy.weights_digest:
        champion, measured = None, None  # none yet, or this very policy, measured again
    else:
        measured = evaluation_of_weights(project.store, digest)
    if champion is not None and measured is None:
        return None, GateDecision(False, _unknown_champion(project, champion))
    decision = gate(
        result, measured, metric=settings.metric, min_delta=settings.min_delta, min_value=settings.min_value
    )
    return measured, decision


def _unknown_champion(project: Project, champion: "RegisteredModel") -> str:
    said = f"the champion (version {champion.version} of {champion.name}) was never evaluated here"
    if project.home.root in champion.folder.parents or project.checkpoints in champion.folder.parents:
        return f"{said}: launch evaluate_job for its round"
    return (
        f"{said}: its checkpoint {champion.folder} is of another project on this MLflow server; start projects that "
        "share one under names (or registry.model_name) of their own"
    )
