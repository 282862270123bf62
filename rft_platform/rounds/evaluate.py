"""Evaluation of a round: load the new weights into the engine, run the held-out tasks, and decide on promotion."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from rft_platform.common.progress import report
from rft_platform.config.schema.buffer import Taskset
from rft_platform.evaluation.evaluate import evaluate
from rft_platform.evaluation.plots import inline_curve, learning_curve
from rft_platform.evaluation.report import data_uri, markdown_report, write_report
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.file_names import round_key
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel
from rft_platform.rounds.maintenance.checkpoint_retention import thin_checkpoints
from rft_platform.rounds.project.policy import deploy, ended_with
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, read, required, write
from rft_platform.rounds.project.repair import repair_on_failure
from rft_platform.rounds.releases.promotion import compared, decide, promoted_later
from rft_platform.rounds.reporting.round_history import curve_points, evaluation_of
from rft_platform.rounds.reporting.run_log import finish_runs, record_evaluation, scores_of
from rft_platform.rounds.setup.side_engines import serving_auxiliaries, serving_policies
from rft_platform.rounds.setup.taskset_binding import judge_of, measured_by, sampling_of, workflow_of
from rft_platform.tasks.dataset import TaskDataset

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

_log = logging.getLogger(__name__)
_MANY_NEAR_PASSES = 0.2  # share of the rewards just below a pass from which a warning is logged


def measure(project: Project, engine: PolicyEngine, round_number: int) -> list[EvaluationResult]:
    """Sampled and greedy scores on every held-out taskset, in the order of the configuration.

    The other policies take part in the versions that the round published.
    """
    settings = project.config.evaluation
    results, policies = [], ended_with(project, round_number)
    with serving_auxiliaries(project) as auxiliaries, serving_policies(project, policies) as engines:
        for taskset, dataset in project.eval_tasks:
            runs = taskset.rollout_args.n or settings.sampled_n
            greedy = settings.greedy
            results.append(
                measure_taskset(project, engine, taskset, dataset, round_number, runs, greedy, auxiliaries, engines)
            )
    if settings.gate.metric in ("sampled_pass", "greedy_pass"):
        warn_of_near_passes(results)
    return results


def warn_of_near_passes(results: Sequence[EvaluationResult]) -> None:
    """Warn if many rewards are slightly too low for a pass: the judge perhaps gives right answers less than 1."""
    share = max((result.near_pass_share for result in results), default=0.0)
    if share >= _MANY_NEAR_PASSES:
        _log.warning(
            "%.0f %% of the held-out rewards lie between 0.8 and 1, and a run passes only with a reward of 1 or more: "
            "if these answers are right, let the judge give them 1, or let the mean reward decide, not the pass rate: "
            "evaluation: {gate: {metric: mean_reward}}",
            100 * share,
        )


def sampled_pass(project: Project, engine: PolicyEngine) -> float:
    """Sampled pass rate on the first held-out taskset, one run per task, without progress reports."""
    taskset, dataset = project.eval_tasks[0]
    with serving_auxiliaries(project) as auxiliaries:
        result = measure_taskset(project, engine, taskset, dataset, 0, 1, False, auxiliaries, {}, quiet=True)
    return result.summary()["sampled_pass"]


class _Progress:
    """One progress line for the sampled and then the greedy runs of a taskset, which are counted separately."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._before = self._last = 0
        self._mode_ended = False
        report(what, 0, total)

    def __call__(self, done: int, total: int) -> None:
        """``done`` runs of the current mode have finished."""
        if self._mode_ended or done < self._last:
            self._before += self._last
        self._last, self._mode_ended = done, done >= total
        if self._before + done < self._total:  # ``finish`` reports the end, also if runs failed
            report(self._what, self._before + done, self._total)

    def finish(self) -> None:
        """Report that the evaluation has finished."""
        report(self._what, self._total, self._total)


def measure_taskset(
    project: Project,
    engine: PolicyEngine,
    taskset: Taskset,
    dataset: TaskDataset,
    round_number: int,
    sampled_n: int,
    greedy: bool,
    auxiliaries: Mapping[str, AuxiliaryModel],
    policies: Mapping[str, PolicyEngine],
    quiet: bool = False,
    transcripts: int = 6,
) -> EvaluationResult:
    """Scores of the policy that the engine serves on the tasks of ``dataset``; ``quiet``: without a progress line."""
    config = project.config
    name = "start" if round_number == 0 else round_key(round_number)
    if len(project.eval_tasks) > 1:
        name = f"{name} {taskset.name or dataset.tasks[0].taskset}"
    progress = None if quiet else _Progress(f"{name} evaluation", len(dataset.tasks) * (sampled_n + greedy))
    result = evaluate(
        engine,
        dataset.tasks,
        workflow=workflow_of(project, taskset),
        judge=judge_of(project, taskset),
        sampled_n=sampled_n,
        greedy=greedy,
        sampling=sampling_of(project, taskset),
        seed=config.seed,
        round=round_number,
        bootstrap_seed=config.evaluation.bootstrap_seed,
        limits=project.settings.limits,
        transcripts=transcripts,
        max_abs_reward=taskset.max_abs_reward,
        auxiliary_models=auxiliaries,
        policies=policies,
        measured_by=measured_by(project, taskset),
        on_progress=progress,
    )
    if progress is not None:
        progress.finish()
    return result


def evaluate_round(
    project: Project,
    engine: PolicyEngine,
    registry: "ModelRegistry",
    round_number: int,
    force: bool = False,
    promote: bool = True,
) -> RoundEvaluation:
    """Serve the round's policy. If an evaluation is due or forced, run it and promote the policy if it passes the gate.

    With ``promote=False``, and if a newer version was promoted, the champion does not change, and the decision of an
    earlier evaluation stays.
    """
    started = perf_counter()
    policy = required(project.store, round_number)
    with repair_on_failure(project, policy):
        canary_delta = deploy(engine, policy)
    seconds = {"deploy_s": perf_counter() - started}
    cpu = process_time() + engine.status().cpu_seconds
    if project.eval_tasks and (force or is_due(project, round_number)):
        outcome = _evaluate(project, engine, registry, policy, promote)
    elif (known := read(project.store, round_number).evaluated) is not None and known.results:
        return replace(known, results=[], compared=[])
    else:
        outcome = RoundEvaluation("not due in this round")
    seconds["evaluation_s"] = perf_counter() - started - seconds["deploy_s"]
    seconds["evaluation_cpu_s"] = process_time() + engine.status().cpu_seconds - cpu
    canary = {} if canary_delta is None else {"canary_delta": canary_delta}
    outcome = replace(outcome, metrics={**outcome.metrics, **canary, **seconds})
    write(project.store, round_number, outcome)
    thin_checkpoints(project, registry)
    own = read(project.store, round_number).selection()
    is_last = round_number == project.rounds_budget or (own is not None and own.last)  # dynamic: before the budget
    if is_last and project.config.mode != "bench":
        finish_runs(project, registry)
    return outcome


def is_due(project: Project, round_number: int) -> bool:
    """Whether the configuration requests an evaluation of this round; the last round is always evaluated."""
    if round_number == 0:
        return project.config.explorer.eval_on_startup
    if project.config.synchronizer.dynamic:
        return _is_due_by_batches(project, round_number)
    return round_number % project.config.evaluation.every == 0 or round_number == project.rounds_budget


def _is_due_by_batches(project: Project, round_number: int) -> bool:
    """Whether the number of trained explore batches passed a multiple of ``evaluation.every``, in the dynamic styles.

    The last training is always evaluated.
    """
    every = project.config.evaluation.every
    before, own = (read(project.store, number).selection() for number in (round_number - 1, round_number))
    return own is not None and (own.last or own.through // every > (before.through if before else 0) // every)


def _evaluate(
    project: Project, engine: PolicyEngine, registry: "ModelRegistry", policy: Policy, promote: bool
) -> RoundEvaluation:
    store = project.store
    results = measure(project, engine, policy.round)
    first = results[0]
    champion, decision, regression = decide(project, registry, policy, results)
    earlier = read(store, policy.round).evaluated or RoundEvaluation()
    newer = promoted_later(project, registry, policy) if promote else None
    promote = promote and newer is None
    decided = not promote and earlier.gate_passed is not None  # the model version keeps the numbers of that decision
    promoted = decision.passed and policy.model_version is not None if promote else earlier.promoted
    if not promote:
        why = "" if newer is None else f", because {newer} is newer"
        why += "; the decision of the earlier evaluation stays" if decided else ""
        decision = replace(decision, reason=f"{decision.reason}; nothing is promoted by this evaluation{why}")
    start = evaluation_of(store, 0)
    differences = compared(project, policy, first, champion)
    best = policy.round if promoted else None if champion is None else champion.round
    points = curve_points(store, policy.round, first)
    png = learning_curve(points, f"{project.config.project} / {project.config.name}", best)

    def page(picture: str) -> str:
        return markdown_report(
            first,
            title=project.config.project,
            picture=picture,
            start=start,
            champion=champion,
            decision=decision,
            compared=differences,
            regression=regression,
        )

    write_report(store.round_folder(policy.round), page, png)
    scores = {**scores_of(first, differences), **(regression.figures() if regression else {})}
    recorded = {name: value for name, value in scores.items() if not (decided and name.startswith("vs_champion/"))}
    record_evaluation(project, registry, policy, recorded, None if decided else decision.reason, results)
    if promote and promoted:
        registry.promote(int(policy.model_version or 0))
    metrics = {**scores, **{name: value for result in results for name, value in result.metrics.items()}}
    return RoundEvaluation(
        gate=decision.reason,
        gate_summary=decision.summary if promote else earlier.gate_summary or earlier.gate,
        promoted=promoted,
        gate_passed=decision.passed if promote else earlier.gate_passed,
        promoted_because=earlier.promoted_because if promoted else None,
        rolled_back_at=None if promoted else earlier.rolled_back_at,
        results=results,
        markdown=page(data_uri(png)),
        curve=inline_curve(points, best),
        metrics=metrics,
        compared=differences,
        regression=regression,
    )
