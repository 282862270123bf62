"""The verdict on a canary release: compare the success rates of candidate and base, with a confidence interval.

The interval of the difference is Newcombe's hybrid score interval (R. G. Newcombe, Statistics in Medicine 17, 1998,
method 10). A *look* is one comparison. The number of looks is fixed: after N, 2N, 4N... runs of the candidate. Every
look has its share of the error probability (Bonferroni), so that several looks do not raise the total.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any, Literal

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


METRICS = ("accuracy", "latency_s", "satisfaction")  #: the first one decides
_LEAST_UNITS = 2
_NO_VARIANCE = 1e-12
_UNITS_TO_DECIDE = 30  # with this number of units their mean is close enough to a normal distribution

Winner = Literal["base", "candidate"]
Values = Mapping[str, Sequence[float]]  # metric -> mean of each unit


@dataclass(frozen=True, slots=True)
class ABRule:
    """When an A/B test is decided: after ``units`` of each version.

    ``alpha`` is the probability that a winner is reported although the versions are equal.
    """

    units: int = 200
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if self.units < _UNITS_TO_DECIDE or not 0 < self.alpha < 1:
            raise UserError(f"A/B test {self}: expected at least {_UNITS_TO_DECIDE} units, alpha between 0 and 1")


@dataclass(frozen=True, slots=True)
class MetricReport:
    """One metric of both versions, with the 95 % interval of candidate minus base."""

    metric: str
    base: float | None
    candidate: float | None
    base_units: int
    candidate_units: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, slots=True)
class ABReport:
    """The state of an A/B test. ``complete``: the planned number of units is reached, so ``winner`` is final."""

    complete: bool
    winner: Winner | None
    reason: str
    metrics: list[MetricReport] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def ab_report(base: Values, candidate: Values, rule: ABRule) -> ABReport:
    """Compare the units of both versions under ``rule``."""
    reports = [_compare(metric, base.get(metric, ()), candidate.get(metric, ())) for metric in METRICS]
    decisive = reports[0]
    reached = min(decisive.base_units, decisive.candidate_units)
    if reached < rule.units:
        units = f"{decisive.base_units} units of the base and {decisive.candidate_units} of the candidate"
        return ABReport(False, None, f"{units}, {rule.units} of each needed", reports)
    assert decisive.p_value is not None
    assert decisive.difference is not None
    p = f"{decisive.metric} {decisive.difference:+.4f}, p = {decisive.p_value:.2g}"
    if decisive.p_value >= rule.alpha:
        return ABReport(True, None, f"no significant difference: {p}", reports)
    winner: Winner = "candidate" if decisive.difference > 0 else "base"
    return ABReport(True, winner, f"the {winner} is better: {p}", reports)


def _compare(metric: str, base: Sequence[float], candidate: Sequence[float]) -> MetricReport:
    means = (fmean(base) if base else None, fmean(candidate) if candidate else None)
    counts = (len(base), len(candidate))
    if min(counts) < _LEAST_UNITS:
        return MetricReport(metric, *means, *counts)
    difference = fmean(candidate) - fmean(base)
    return MetricReport(metric, *means, *counts, difference, *_welch(base, candidate, difference))


def _welch(base: Sequence[float], candidate: Sequence[float], difference: float) -> tuple[float, float, float]:
    """The 95 % interval of the difference of means, and its p value."""
    parts = [variance(values) / len(values) for values in (base, candidate)]
    error = math.sqrt(sum(parts))
    if error < _NO_VARIANCE:  # without variance there is no t statistic
        return difference, difference, 1.0 if abs(difference) < _NO_VARIANCE else 0.0
    shares = [part**2 / (len(values) - 1) for part, values in zip(parts, (base, candidate), strict=True)]
    freedom = sum(parts) ** 2 / sum(shares)
    from scipy.stats import t  # takes a second

    half = float(t.ppf(0.975, freedom)) * error
    return difference - half, difference + half, 2 * float(t.sf(abs(difference) / error, freedom))
