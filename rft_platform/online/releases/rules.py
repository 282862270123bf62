"""The rule that decides a release: candidate and base are compared by the confidence interval of their difference.

A *look* is one comparison. The number of looks is fixed: after N, 2N, 4N... samples of each version. Every look has its
share of the error probability (Bonferroni), so that several looks do not raise the total. There are two presets:

- A canary (``canary_rule``) asks at several looks whether the candidate is not worse by more than a margin. Samples are
  labelled runs; the interval is Newcombe's hybrid score interval of two success rates (R. G. Newcombe, Statistics in
  Medicine 17, 1998, method 10).
- An A/B test (``ab_rule``) asks once which version is better. Samples are units, for example users; the interval of
  their means is Welch's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Literal

from rft_platform.common.errors import UserError

Decision = Literal["wait", "promote", "roll_back", "undecided"]
Values = Mapping[str, Sequence[float]]  # metric -> mean of each unit

METRICS = ("accuracy", "latency_s", "satisfaction")  #: the first one decides
_LEAST_UNITS = 2
_NO_VARIANCE = 1e-12
_UNITS_TO_DECIDE = 30  # with this number of units their mean is close enough to a normal distribution


@dataclass(frozen=True, slots=True)
class ReleaseRule:
    """When a release is decided. ``margin``: the candidate's true mean may be lower than the base's by this."""

    samples: int  # of each version at the first look
    looks: int
    confidence: float  # over all looks together
    margin: float

    def samples_at(self, look: int) -> int:
        """The number of samples of each version that look ``look`` (from 0) needs."""
        return self.samples * 2**look

    @property
    def look_confidence(self) -> float:
        """Confidence of the interval of one look."""
        return 1 - (1 - self.confidence) / self.looks

    def decision(self, low: float, high: float, looks_done: int) -> Decision:
        """Decide by the interval of candidate minus base; "undecided", at the last look: the base serves."""
        if low > -self.margin:
            return "promote"
        if high < 0:
            return "roll_back"
        return "undecided" if looks_done + 1 >= self.looks else "wait"


def canary_rule(least_runs: int = 100, looks: int = 4, confidence: float = 0.95, margin: float = 0.05) -> ReleaseRule:
    """The rule of a canary, with ``least_runs`` labelled runs of each version at the first look."""
    if least_runs < 1 or looks < 1 or not 0.5 <= confidence < 1 or not 0 <= margin < 1:
        raise UserError(
            f"canary rule with least_runs {least_runs}, looks {looks}, confidence {confidence:g}, margin {margin:g}: "
            "expected least_runs and looks from 1, confidence from 0.5 to below 1, margin from 0 to below 1"
        )
    return ReleaseRule(least_runs, looks, confidence, margin)


def ab_rule(units: int = 200, alpha: float = 0.05) -> ReleaseRule:
    """The rule of an A/B test, which is decided after ``units`` of each version.

    ``alpha`` is the probability that a winner is reported although the versions are equal.
    """
    if units < _UNITS_TO_DECIDE or not 0 < alpha < 1:
        raise UserError(
            f"A/B test with {units} units, alpha {alpha:g}: expected at least {_UNITS_TO_DECIDE} units, alpha between "
            "0 and 1"
        )
    return ReleaseRule(units, 1, 1 - alpha, 0.0)


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
class Verdict:
    """A decision on a release with its reason, and the interval of the difference candidate minus base."""

    decision: Decision
    reason: str
    looked: bool = False  # whether this verdict counts as one of the rule's looks
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    metrics: list[MetricReport] = field(default_factory=list)  # of an A/B test


def canary_verdict(base: Successes, candidate: Successes, rule: ReleaseRule, looks_done: int = 0) -> Verdict:
    """Decide on a canary after ``looks_done`` earlier looks.

    "Certain" means by the confidence interval. The candidate is promoted when its rate is certainly not lower by
    ``margin`` or more. It is rolled back when its rate is certainly lower, or at the last look if it is not promoted.
    """
    needed = rule.samples_at(looks_done)
    if min(base.runs, candidate.runs) < needed:
        return Verdict(
            "wait",
            f"{candidate.runs} labelled runs of the candidate and {base.runs} of the base, {needed} of each needed",
        )
    low, high = difference_interval(base, candidate, rule.look_confidence)
    numbers = (
        f"success rate {candidate.rate:.3f} of {candidate.runs} against {base.rate:.3f} of {base.runs}, "
        f"difference {candidate.rate - base.rate:+.3f} ({low:+.3f} to {high:+.3f})"
    )
    decision = rule.decision(low, high, looks_done)
    why = {
        "wait": f"it is looked at again at {rule.samples_at(looks_done + 1)} runs of each",
        "promote": f"the loss is certainly smaller than the margin {rule.margin:g}",
        "roll_back": "the candidate is certainly worse",
        "undecided": f"after {rule.looks} looks a loss of {rule.margin:g} is still possible",
    }[decision]
    chosen: Decision = "roll_back" if decision == "undecided" else decision
    return Verdict(chosen, f"{numbers}: {why}", True, candidate.rate - base.rate, low, high)


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


def ab_verdict(base: Values, candidate: Values, rule: ReleaseRule) -> Verdict:
    """Compare the units of both versions under ``rule``: the better version serves in the end, without one the base."""
    reports = [_compare(metric, base.get(metric, ()), candidate.get(metric, ())) for metric in METRICS]
    decisive = reports[0]
    if min(decisive.base_units, decisive.candidate_units) < rule.samples_at(0):
        units = f"{decisive.base_units} units of the base and {decisive.candidate_units} of the candidate"
        return Verdict("wait", f"{units}, {rule.samples_at(0)} of each needed", metrics=reports)
    low, high, p_value = _welch(base[decisive.metric], candidate[decisive.metric], rule.look_confidence)
    decision = rule.decision(low, high, 0)
    why = {"promote": "the candidate is better", "roll_back": "the base is better"}
    figures = f"{decisive.metric} {decisive.difference:+.4f}, p = {p_value:.2g}"
    reason = f"{why.get(decision, 'no significant difference')}: {figures}"
    return Verdict(decision, reason, True, decisive.difference, low, high, reports)


def _compare(metric: str, base: Sequence[float], candidate: Sequence[float]) -> MetricReport:
    means = (fmean(base) if base else None, fmean(candidate) if candidate else None)
    counts = (len(base), len(candidate))
    if min(counts) < _LEAST_UNITS:
        return MetricReport(metric, *means, *counts)
    return MetricReport(metric, *means, *counts, fmean(candidate) - fmean(base), *_welch(base, candidate, 0.95))


def _welch(base: Sequence[float], candidate: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """The interval of the difference of means, and its p value."""
    difference = fmean(candidate) - fmean(base)
    parts = [variance(values) / len(values) for values in (base, candidate)]
    error = math.sqrt(sum(parts))
    if error < _NO_VARIANCE:  # without variance there is no t statistic
        return (0.0, 0.0, 1.0) if abs(difference) < _NO_VARIANCE else (difference, difference, 0.0)
    shares = [part**2 / (len(values) - 1) for part, values in zip(parts, (base, candidate), strict=True)]
    freedom = sum(parts) ** 2 / sum(shares)
    from scipy.stats import t  # takes a second

    half = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return difference - half, difference + half, 2 * float(t.sf(abs(difference) / error, freedom))
