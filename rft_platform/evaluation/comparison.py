"""Compare two policies on the same tasks: the difference and its 95 % interval.

The comparison is paired: each task contributes one difference, so a task that is hard for both policies does not widen
the interval. The interval of pass rates stays valid if the policies differ on no task or on every task. The interval of
rewards is that of Student's t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rft_platform.config.schema.evaluation import PAIRED_METRICS
from rft_platform.evaluation.metrics import paired_interval, paired_share_interval
from rft_platform.evaluation.results import GREEDY, MODES, SAMPLED, EvaluationResult, measured_alike
from rft_platform.experience.record import REWARD_ROUNDING


@dataclass(frozen=True, slots=True)
class Comparison:
    """A policy compared with another one by a metric, over the tasks for which both have scores."""

    against: str  # "previous", "champion" or "start"
    metric: str
    round: int  # round of the other policy
    policy_version: int  # version of the other policy
    difference: float  # this policy's mean minus the other's
    low: float  # 95 % interval of the difference over tasks
    high: float
    tasks: int

    @property
    def verdict(self) -> str:
        """Meaning of the interval: better, worse, or not clearly different."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "not clearly different"

    def named(self) -> dict[str, float]:
        """Return the numbers with names for plots: ``vs_champion/sampled_pass``, ``..._low``, ``..._high``."""
        name = f"vs_{self.against}/{self.metric}"
        return {name: self.difference, f"{name}_low": self.low, f"{name}_high": self.high}


def compare(result: EvaluationResult, other: EvaluationResult, metric: str, against: str) -> Comparison | None:
    """Return the difference by ``metric``, one of ``PAIRED_METRICS``.

    None if a result has no score of this metric, if they share no task, or if they were not ``measured_alike``.
    """
    pair = paired_scores(result, other, metric)
    if not pair[0] or not measured_alike(result, other):
        return None
    difference, low, high = paired_interval(*pair) if metric == "mean_reward" else paired_share_interval(*pair)
    return Comparison(against, metric, other.round, other.policy_version, difference, low, high, len(pair[0]))


def paired_scores(result: EvaluationResult, other: EvaluationResult, metric: str) -> tuple[list[float], list[float]]:
    """The scores of both results on the tasks that both have, in the same order."""
    mine, theirs = task_means(result, metric), task_means(other, metric)
    shared = [task for task in mine if task in theirs]
    return [mine[task] for task in shared], [theirs[task] for task in shared]


def comparisons(result: EvaluationResult, others: Mapping[str, EvaluationResult]) -> list[Comparison]:
    """Compare ``result`` with each of ``others`` by every metric that both have."""
    found = [compare(result, other, metric, against) for against, other in others.items() for metric in PAIRED_METRICS]
    return [comparison for comparison in found if comparison is not None]


def distinct(found: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with each policy once: its names are joined, as in ``previous, start`` in the first round."""
    alike: dict[tuple[str, int, int], list[Comparison]] = {}
    for each in found:
        alike.setdefault((each.metric, each.round, each.policy_version), []).append(each)
    return [replace(group[0], against=", ".join(each.against for each in group)) for group in alike.values()]


def task_means(result: EvaluationResult, metric: str) -> dict[str, float]:
    """Mean score of each task's runs: task id -> pass rate or reward; empty for a mode that was not run."""
    table = result.scores.get(_mode(result, metric), {})
    if metric == "mean_reward":
        return {task: _mean(runs) for task, runs in table.items()}
    return {
        task: _mean([run >= result.pass_threshold - REWARD_ROUNDING for run in runs]) for task, runs in table.items()
    }


def _mode(result: EvaluationResult, metric: str) -> str:
    if metric == "mean_reward":
        return next((mode for mode in MODES if mode in result.scores), SAMPLED)
    return GREEDY if metric == "greedy_pass" else SAMPLED


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
