"""The report of an A/B test: every metric of both versions, the differences with interval and p value, and the winner.

The unit of the analysis is the unit of the assignment, for example a user, because several calls of one user are not
independent. Welch's t test compares the means of units. When both versions have the planned number of units, the first
metric alone decides the winner, once; the other metrics are only reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any, Literal

from rft_platform.common.errors import UserError

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
    from scipy.stats import t  # type: ignore[import-untyped]  # takes a second

    half = float(t.ppf(0.975, freedom)) * error
    return difference - half, difference + half, 2 * float(t.sf(abs(difference) / error, freedom))
