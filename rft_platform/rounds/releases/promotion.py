"""The champion, and the comparisons of a policy with its predecessor, the champion and the starting policy."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.evaluation.comparison import Comparison, comparisons
from rft_platform.evaluation.gate import GateDecision, RegressionResult, compare_with_start, gate
from rft_platform.evaluation.results import EvaluationResult, measured_alike
from rft_platform.model_registry.models import DIGEST_TAG, PREVIOUS_TAG
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, published, read, write
from rft_platform.rounds.releases.released import serving_policy, withdrawn_versions
from rft_platform.rounds.reporting.round_history import evaluation_of, evaluation_of_weights, previous_evaluation

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry, RegisteredModel


def compared(
    project: Project, policy: Policy, result: EvaluationResult, champion: EvaluationResult | None
) -> list[Comparison]:
    """Compare ``result`` of ``policy`` with the evaluations of the previous policy, the champion and the start.

    A policy is not compared with itself: a round that trained nothing publishes the weights of the round before.
    """
    store = project.store
    others = {
        "previous": previous_evaluation(store, result.round),
        "champion": champion,
        "start": evaluation_of(store, 0),
    }
    different = {name: other for name, other in others.items() if other and not _has_weights(project, other, policy)}
    return comparisons(result, different)


def _has_weights(project: Project, result: EvaluationResult, policy: Policy) -> bool:
    """Whether ``result``, an evaluation in this project, measured the weights of ``policy``."""
    measured = published(project.store, result.round)
    return measured is not None and measured.weights_digest == policy.weights_digest


def promoted_last(project: Project) -> EvaluationResult | None:
    """The evaluation that promoted the newest champion of this project, according to the notes."""
    for number in reversed(project.store.rounds()):
        evaluated = read(project.store, number).evaluated
        if evaluated is not None and evaluated.promoted:
            return evaluated.first
    return None


def promoted_later(project: Project, registry: "ModelRegistry", policy: Policy) -> str | None:
    """The newer version that was promoted already, in words; None if ``policy`` may be promoted.

    The records list promotions in the order of the rounds, so no version can replace a newer one.
    """
    champion, store = registry.champion(), project.store
    if champion is not None and champion.version > int(policy.model_version or 0):
        return f"model version {champion.version}"
    for number in reversed(store.rounds()):
        if number <= policy.round:
            return None
        other, evaluated = published(store, number), read(store, number).evaluated
        if other is None or evaluated is None or other.weights_digest == policy.weights_digest:
            continue
        if evaluated.promoted:
            return f"policy version {other.policy_version}"
    return None


def roll_back(project: Project, registry: "ModelRegistry") -> "RegisteredModel":
    """Make the champion's predecessor the champion again, and return it.

    The evaluations that promoted the champion are changed first: a call repeated after a kill then goes back one
    version, not two. Raises UserError if there is no predecessor.
    """
    store, replaced = project.store, registry.last_promoted()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for number in store.rounds():
        policy, evaluated = published(store, number), read(store, number).evaluated
        if evaluated is None or not evaluated.promoted or policy is None:
            continue
        if policy.model_version == str(replaced.version):
            write(store, number, replace(evaluated, promoted=False, rolled_back_at=now))
    return registry.rollback()


def promote_version(project: Project, registry: "ModelRegistry", policy_version: int, reason: str) -> "RegisteredModel":
    """Make an evaluated version the champion without the gate, and return it.

    Raises UserError for a version that does not exist or was not evaluated, and for one older than the champion: the
    records list promotions in the order of the rounds. A call repeated after a kill completes the promotion.
    """
    store = project.store
    policies = [policy for number in store.rounds() if (policy := published(store, number)) and policy.model_version]
    found = next((policy for policy in policies if policy.policy_version == policy_version), None)
    if found is None:
        known = ", ".join(sorted({str(policy.policy_version) for policy in policies}, key=int)) or "none"
        meant = [policy.policy_version for policy in policies if policy.model_version == str(policy_version)]
        hint = f"; model version {policy_version} is policy version {meant[0]}" if meant else ""
        registered = f"registered are {known}: give one of them{hint}"
        raise UserError(f"no registered policy version {policy_version}; {registered}")
    champion, version = registry.champion(), int(found.model_version or 0)
    if champion is not None and champion.version > version:
        raise UserError(
            f"policy version {policy_version} (model version {version}) is older than the champion (model version "
            f"{champion.version}): go back with `rft models rollback`"
        )
    evaluated = read(store, found.round).evaluated
    if evaluated is None or not evaluated.results:
        raise UserError(
            f"policy version {policy_version} was not evaluated: run `rft eval --all` first, then promote it"
        )
    write(store, found.round, replace(evaluated, promoted=True, promoted_because=reason, rolled_back_at=None))
    registry.promote(version)
    return registry.resolve(f"models:/{registry.model_name}/{version}")


def _champion_before(project: Project, registry: "ModelRegistry", policy: Policy) -> "RegisteredModel | None":
    """The champion that the policy has to beat.

    If a process promoted the policy and was killed before it recorded the evaluation, the policy is the champion
    already. The repeated evaluation then compares it with its predecessor, as the killed one did.
    """
    champion = registry.champion()
    if champion is None or str(champion.version) != policy.model_version:
        return champion
    store = project.store
    earlier = (published(store, number, policy.name) for number in store.rounds() if number < policy.round)
    trained_nothing = any(other is not None and other.weights_digest == policy.weights_digest for other in earlier)
    if trained_nothing or read(store, policy.round).has(RoundEvaluation):
        return champion
    before = champion.tags.get(PREVIOUS_TAG)
    return next((version for version in registry.versions() if str(version.version) == str(before)), None)


def decide(
    project: Project, registry: "ModelRegistry", policy: Policy, results: Sequence[EvaluationResult]
) -> tuple[EvaluationResult | None, GateDecision, RegressionResult | None]:
    """Return the champion's evaluation, whether the policy becomes champion, and its result on the regression set.

    ``results`` are those of all held-out tasksets. A policy that passes the gate is refused if its scores on the
    regression set fell, or if its weights were rolled back, unless its weights are the champion's already.
    """
    champion, decision = against_champion(project, registry, policy, results[0])
    found = against_regression_set(project, policy, results)
    current = registry.champion()
    if not decision.passed or (current is not None and current.tags.get(DIGEST_TAG) == policy.weights_digest):
        return champion, decision, found
    if (when := _rolled_back_at(project, policy)) is not None:
        why = f"these weights were rolled back at {when}; `rft models promote {policy.policy_version}` promotes them"
        decision = GateDecision(False, f"{decision.reason}; but {why}", "rolled back before")
    elif found is not None and not found.decision.passed:
        decision = GateDecision(False, f"{decision.reason}; but {found.decision.reason}", found.decision.summary)
    return champion, decision, found


def _rolled_back_at(project: Project, policy: Policy) -> str | None:
    """When these weights were rolled back; None if they never were, or if a person has promoted them since."""
    store, when = project.store, None
    for number in store.rounds():
        other, evaluated = published(store, number), read(store, number).evaluated
        if other is None or evaluated is None or other.weights_digest != policy.weights_digest:
            continue
        if evaluated.promoted:  # a roll-back ends the promotion in all rounds with these weights
            return None
        when = evaluated.rolled_back_at or when
    return when


def against_regression_set(
    project: Project, policy: Policy, results: Sequence[EvaluationResult]
) -> RegressionResult | None:
    """Compare a policy with the start on the regression set; None for the start itself, and without such a set."""
    settings = project.config.evaluation.regression
    if settings is None or policy.round == 0:
        return None
    names = [taskset.known_as for taskset in project.config.buffer.explorer_input.eval_tasksets]
    result = results[names.index(settings.taskset)]
    evaluated = read(project.store, 0).evaluated
    of_start = [] if evaluated is None else evaluated.results[1:]
    start = next((each for each in of_start if measured_alike(each, result)), of_start[0] if of_start else None)
    return compare_with_start(result, start, settings)


def against_champion(
    project: Project, registry: "ModelRegistry", policy: Policy, result: EvaluationResult
) -> tuple[EvaluationResult | None, GateDecision]:
    """Return the champion's evaluation, if this project has it, and the decision of the gate.

    Without a champion, the policy is compared with the start, and an equal score is enough unless
    ``evaluation.gate.confident`` is true. If production has withdrawn the champion, the policy is compared with the
    version that serves. A permitted loss (``min_delta`` below 0) counts from the best version so far: if it counted
    from the last one, the losses of several rounds would add up. Weights are identified by their digest, because
    projects that share a server may share policy versions and even a model name.
    """
    settings = project.config.evaluation
    champion = _champion_before(project, registry, policy)
    digest = None if champion is None else champion.tags.get(DIGEST_TAG, "")
    to_beat, measured = "champion", None
    if champion is None:
        to_beat, measured = "start", evaluation_of(project.store, 0) if policy.round else None
    elif digest == policy.weights_digest:
        return None, GateDecision(True, f"these weights are the champion already (version {champion.version})")
    elif (serving := _serving_instead(project, digest or "")) is not None:
        to_beat, measured = "served version", evaluation_of_weights(project.store, serving.weights_digest)
    else:
        measured = evaluation_of_weights(project.store, digest or "")
        if measured is None:
            return None, GateDecision(False, _unknown_champion(project, champion))
    best = _best_before(project, policy, result, measured) if settings.gate.min_delta < 0 else measured
    if best is not measured:
        to_beat = "best version"
    decision = gate(
        result,
        best,
        metric=settings.gate.metric,
        min_delta=settings.gate.min_delta,
        min_value=settings.gate.min_value,
        confident=settings.gate.needs_interval if champion is not None else bool(settings.gate.confident),
        to_beat=to_beat,
    )
    return None if champion is None else measured, decision


def _best_before(
    project: Project, policy: Policy, result: EvaluationResult, measured: EvaluationResult | None
) -> EvaluationResult | None:
    """The best evaluation among ``measured``, the start, and the promoted versions that were not withdrawn.

    Only evaluations count that can be compared with ``result``, the evaluation of ``policy``.
    """
    if measured is None or not measured_alike(result, measured):
        return measured
    metric, best, store = project.config.evaluation.gate.metric, measured, project.store
    withdrawn = withdrawn_versions(project)
    for number in store.rounds():
        evaluated, other = read(store, number).evaluated, published(store, number)
        if number >= policy.round or other is None or other.policy_version in withdrawn:
            continue
        found = evaluated.first if evaluated is not None and (number == 0 or evaluated.promoted) else None
        if found is not None and measured_alike(result, found) and _value(found, metric) > _value(best, metric):
            best = found
    return best


def _value(result: EvaluationResult, metric: str) -> float:
    value = result.value(metric)
    return -math.inf if value is None or math.isnan(value) else value


def _serving_instead(project: Project, digest: str) -> Policy | None:
    """The policy that serves, if a canary, an A/B test or a roll-back has withdrawn the champion with this digest."""
    withdrawn = withdrawn_versions(project)
    policies = (published(project.store, number) for number in project.store.rounds()) if withdrawn else ()
    champion = next((policy for policy in policies if policy is not None and policy.weights_digest == digest), None)
    return serving_policy(project) if champion is not None and champion.policy_version in withdrawn else None


def _unknown_champion(project: Project, champion: "RegisteredModel") -> str:
    said = f"the champion (version {champion.version} of {champion.name}) was never evaluated here"
    if project.home.root in champion.folder.parents or project.checkpoints in champion.folder.parents:
        return f"{said}: launch evaluate_job for its round"
    return (
        f"{said}: its checkpoint {champion.folder} belongs to another project on this MLflow server; start projects "
        "that share one under different names (or registry.model_name)"
    )
