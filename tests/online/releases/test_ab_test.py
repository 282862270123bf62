"""Reports of A/B tests: no winner of equal versions, the right one of different ones."""

import random

import pytest
from scipy.stats import ttest_ind

from rft_platform.common.errors import UserError
from rft_platform.online.releases.rules import ab_rule, ab_verdict

RULE = ab_rule(units=200)


def users(rate: float, seed: int, calls: int = 3, units: int = 200) -> dict[str, list[float]]:
    """Users who differ: each has a success its own rate and several calls."""
    draws = random.Random(seed)
    means, latencies = [], []
    for _ in range(units):
        own = min(1.0, max(0.0, draws.gauss(rate, 0.15)))
        means.append(sum(draws.random() < own for _ in range(calls)) / calls)
        latencies.append(draws.expovariate(1.0))
    return {"accuracy": means, "latency_s": latencies}


def test_equal_versions_have_no_winner() -> None:
    reports = [ab_verdict(users(0.6, seed), users(0.6, 10_000 + seed), RULE) for seed in range(100)]
    assert all(report.looked for report in reports)
    assert sum(report.decision != "undecided" for report in reports) <= 5


def test_the_better_version_wins() -> None:
    for seed in range(50):
        assert ab_verdict(users(0.5, seed), users(0.7, 10_000 + seed), RULE).decision == "promote"
        assert ab_verdict(users(0.7, seed), users(0.5, 10_000 + seed), RULE).decision == "roll_back"


def test_the_numbers_are_scipys() -> None:
    base, candidate = users(0.5, 1)["accuracy"], users(0.6, 2)["accuracy"]
    found, report = (
        ttest_ind(candidate, base, equal_var=False),
        ab_verdict(users(0.5, 1), users(0.6, 2), RULE).metrics[0],
    )
    assert report.p_value == pytest.approx(found.pvalue)
    assert (report.low, report.high) == pytest.approx(tuple(found.confidence_interval(0.95)))


def test_a_report_before_the_planned_units_has_no_winner() -> None:
    report = ab_verdict(users(0.1, 1, units=150), users(0.9, 2, units=250), RULE)
    assert (report.looked, report.decision) == (False, "wait")
    assert "150 units of the base" in report.reason
    accuracy, latency, satisfaction = report.metrics
    assert accuracy.p_value < 1e-9
    assert accuracy.low < accuracy.difference < accuracy.high
    assert latency.p_value > 0.01
    assert satisfaction.p_value is None


def test_constant_values() -> None:
    same, other = {"accuracy": [1.0] * 200}, {"accuracy": [0.0] * 200}
    assert ab_verdict(same, same, RULE).decision == "undecided"
    report = ab_verdict(other, same, RULE)
    assert (report.decision, report.metrics[0].p_value) == ("promote", 0.0)
    assert ab_verdict({"accuracy": [1.0] * 200}, {"accuracy": [1.0] * 199 + [0.0]}, RULE).decision == "undecided"
    assert ab_verdict(users(0.5, 1), {"accuracy": [1.0] * 200}, RULE).decision == "promote"
    assert report.metrics[0].base_units == 200


def test_rules_without_sense_are_refused() -> None:
    with pytest.raises(UserError, match="at least 30"):
        ab_rule(units=10)
