"""The history of a project's rounds, read from their records: evaluations, the learning curve, and time per stage."""

from collections.abc import Mapping

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.evaluation.plots import CurvePoint
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import Explored, Judged, RoundEvaluation, RoundRecord, published, read

PARTS = ("rollout", "judge", "train", "evaluation")


def evaluation_of(store: ExperienceStore, round_number: int) -> EvaluationResult | None:
    """The evaluation of a round on the first held-out taskset; None if there is none."""
    evaluated = read(store, round_number).evaluated
    return None if evaluated is None else evaluated.first


def previous_evaluation(store: ExperienceStore, round_number: int) -> EvaluationResult | None:
    """The evaluation of the newest round before ``round_number`` that has one."""
    for number in reversed([n for n in store.rounds() if n < round_number]):
        result = evaluation_of(store, number)
        if result is not None:
            return result
    return None


def evaluation_of_weights(store: ExperienceStore, weights_digest: str) -> EvaluationResult | None:
    """The newest evaluation of a set of weights on the first held-out taskset; None if there is none."""
    evaluated = evaluated_weights(store, weights_digest)
    return None if evaluated is None else evaluated.first


def evaluated_weights(
    store: ExperienceStore, weights_digest: str, policy_name: str = DEFAULT_POLICY
) -> RoundEvaluation | None:
    """The newest evaluation with results of a set of weights. A no-op round evaluates those of its parent again."""
    for number in reversed(store.rounds()):
        policy = published(store, number, policy_name)
        if policy is not None and policy.weights_digest == weights_digest:
            evaluated = read(store, number).evaluated
            if evaluated is not None and evaluated.results:
                return evaluated
    return None


def curve_points(store: ExperienceStore, last_round: int, newest: EvaluationResult | None = None) -> list[CurvePoint]:
    """One point per round up to ``last_round``, round 0 first; ``newest`` replaces the last round's evaluation."""
    points = []
    for number in [number for number in store.rounds() if number <= last_round]:
        result = newest if newest is not None and number == last_round else evaluation_of(store, number)
        point = curve_point(read(store, number), {} if result is None else result.summary())
        points += [] if point is None else [point]
    return points


def curve_point(record: RoundRecord, scores: Mapping[str, float]) -> CurvePoint | None:
    """The point of a round whose evaluation gave ``scores``; None before the round has published its policy."""
    policy, trained = record.published(), record.trained()
    if policy is None:
        return None
    metrics = {} if trained is None else trained.metrics
    return CurvePoint(
        round=record.number,
        policy_version=policy.policy_version,
        sampled=scores.get("sampled_pass"),
        sampled_low=scores.get("sampled_pass_low"),
        sampled_high=scores.get("sampled_pass_high"),
        greedy=scores.get("greedy_pass"),
        reward=(record.judged or Judged()).mean_reward,
        mismatch=metrics.get("mismatch_k3"),
        entropy=metrics.get("entropy"),
    )


def time_split(record: RoundRecord, wall_s: float | None = None) -> dict[str, float]:
    """Seconds per part; if ``wall_s``, the total time of the launches, is known, ``overhead`` is the rest of it.

    A part that was not made or not measured is left out.
    """
    scores = {} if record.evaluated is None else record.evaluated.metrics
    trained, judged = record.trained(), record.judged or Judged()
    # A round that was judged again did not take longer.
    used = trained.lineage.get("judge_version") if trained else None
    measured = {
        "rollout": (record.explored or Explored()).seconds,
        "judge": judged.seconds_of(used) if used in judged.judge_names else judged.seconds,
        # Loading the weights into the engine counts as training.
        "train": sum(trained.seconds.values()) + scores.get("deploy_s", 0.0) if trained and trained.seconds else None,
        "evaluation": scores.get("evaluation_s"),
    }
    split = {name: float(seconds) for name in PARTS if (seconds := measured[name]) is not None}
    if wall_s is not None and len(split) == len(PARTS):
        split["overhead"] = max(0.0, wall_s - sum(split.values()))
    return split
