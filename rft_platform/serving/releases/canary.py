"""The verdict on a canary release: compare the success rates of candidate and base, with a confidence interval.

The interval of the difference is Newcombe's hybrid score interval (R. G. Newcombe, Statistics in Medicine 17, 1998,
method 10). A *look* is one comparison. The number of looks is fixed: after N, 2N, 4N... runs of the candidate. Every
look has its share of the error probability (Bonferroni), so that several looks do not raise the total.
"""

import math
from dataclasses import dataclass
from typing import Literal

from rft_platform.common.errors import UserError

Decision = Literal["wait", "promote", "roll_back"]


@dataclass(frozen=True, slots=True)
class Successes:
    """Numbers of successful and of all labelled runs of one version."""

    successes: int
    runs: int

    @property
    def rate(self) -> float:
        """Success rate; 0 without runs."""
        return self.successes / self.runs if self.runs else 0.0


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """When a canary is decided. ``margin``: the candidate's true success rate may be lower than the base's by this."""

    least_runs: int = 100  # labelled runs of each version at the first look
    looks: int = 4
    confidence: float = 0.95  # over all looks together
    margin: float = 0.05

    def __post_init__(self) -> None:
        if self.least_runs < 1 or self.looks < 1 or not 0.5 <= self.confidence < 1 or not 0 <= self.margin < 1:
            raise UserError(
                f"canary rule {self}: expected least_runs and looks from 1, confidence from 0.5 to below 1, "
                "margin from 0 to below 1"
            )

    def runs_at(self, look: int) -> int:
        """The number of labelled runs of each version that look ``look`` (from 0) needs."""
        return self.least_runs * 2**look


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision on a canary with its reason, and the interval of the difference candidate minus base."""

    decision: Decision
    reason: str
    looked: bool = False  # whether this verdict counts as one of the ``looks``
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def canary_verdict(base: Successes, candidate: Successes, rule: CanaryRule, looks_done: int = 0) -> Verdict:
    """Decide on a canary after ``looks_done`` earlier looks.

    "Certain" means by the confidence interval. The candidate is promoted when its rate is certainly not lower by
    ``margin`` or more. It is rolled back when its rate is certainly lower, or at the last look if it is not promoted.
    """
    needed = rule.runs_at(looks_done)
    if min(base.runs, candidate.runs) < needed:
        return Verdict(
            "wait",
            f"{candidate.runs} labelled runs of the candidate and {base.runs} of the base, {needed} of each needed",
        )
    low, high = difference_interval(base, candidate, 1 - (1 - rule.confidence) / rule.looks)
    last = looks_done + 1 >= rule.looks
    numbers = (
        f"success rate {candidate.rate:.3f} of {candidate.runs} against {base.rate:.3f} of {base.runs}, "
        f"difference {candidate.rate - base.rate:+.3f} ({low:+.3f} to {high:+.3f})"
    )
    decision: Decision = "wait"
    why = f"it is looked at again at {rule.runs_at(looks_done + 1)} runs of each"
    if low > -rule.margin:
        decision, why = "promote", f"the loss is certainly smaller than the margin {rule.margin:g}"
    elif high < 0:
        decision, why = "roll_back", "the candidate is certainly worse"
    elif last:
        decision, why = "roll_back", f"after {rule.looks} looks a loss of {rule.margin:g} is still possible"
    return Verdict(decision, f"{numbers}: {why}", True, candidate.rate - base.rate, low, high)


def difference_interval(base: Successes, candidate: Successes, confidence: float) -> tuple[float, float]:
    """Confidence interval of the candidate's rate minus the base's."""
    (base_low, base_high), (low, high) = _wilson(base, confidence), _wilson(candidate, confidence)
    difference = candidate.rate - base.rate
    return (
        difference - math.hypot(candidate.rate - low, base_high - base.rate),
        difference + math.hypot(high - candidate.rate, base.rate - base_low),
    )


def _wilson(found: Successes, confidence: float) -> tuple[float, float]:
    from scipy.stats import binomtest  # type: ignore[import-untyped]  # takes a second

    interval = binomtest(found.successes, found.runs).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)
