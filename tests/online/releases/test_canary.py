"""Verdicts on canaries: bad ones are rolled back, good ones promoted, equal ones rarely called worse."""

import random

import pytest
from scipy.stats import norm

from rft_platform.common.errors import UserError
from rft_platform.online.releases.rules import ReleaseRule, Successes, canary_rule, canary_verdict, difference_interval

RULE = canary_rule(least_runs=100, looks=4, margin=0.1)


def decide(base_rate: float, rate: float, rule: ReleaseRule, seed: int) -> str:
    """Simulate a canary until it is decided."""
    draws = random.Random(seed)
    base = candidate = 0
    runs = looks = 0
    while True:
        while runs < rule.samples_at(looks):
            runs += 1
            base += draws.random() < base_rate
            candidate += draws.random() < rate
        verdict = canary_verdict(Successes(base, runs), Successes(candidate, runs), rule, looks)
        assert verdict.looked
        looks += 1
        if verdict.decision != "wait":
            return verdict.decision


def test_a_canary_waits_for_runs_of_both_versions() -> None:
    verdict = canary_verdict(Successes(90, 150), Successes(10, 20), RULE)
    assert (verdict.decision, verdict.looked) == ("wait", False)
    assert "20 labelled runs" in verdict.reason
    assert canary_verdict(Successes(1, 2), Successes(90, 150), RULE).decision == "wait"


@pytest.mark.parametrize(("rate", "decision"), [(0.9, "promote"), (0.1, "roll_back"), (0.0, "roll_back")])
def test_clear_cases_are_decided_at_the_first_look(rate, decision) -> None:
    verdict = canary_verdict(Successes(50, 100), Successes(round(100 * rate), 100), RULE)
    assert verdict.decision == decision
    assert verdict.low <= verdict.difference <= verdict.high


def test_the_last_look_rolls_back_what_may_be_worse() -> None:
    wide = canary_rule(least_runs=20, looks=1, margin=0.05)
    assert canary_verdict(Successes(10, 20), Successes(10, 20), wide).decision == "roll_back"
    assert canary_verdict(Successes(10, 20), Successes(10, 20), canary_rule(20, 2, margin=0.05)).decision == "wait"


@pytest.mark.slow
def test_a_candidate_that_is_worse_by_the_margin_is_rarely_promoted() -> None:
    promoted = sum(decide(0.6, 0.5, RULE, seed) == "promote" for seed in range(200))
    assert promoted <= 10, "5 % over all looks together"


@pytest.mark.slow
def test_better_candidates_are_promoted_and_worse_ones_rolled_back() -> None:
    assert sum(decide(0.5, 0.8, RULE, seed) == "promote" for seed in range(100)) == 100
    assert sum(decide(0.8, 0.5, RULE, seed) == "roll_back" for seed in range(100)) == 100
    assert sum(decide(0.7, 0.7, RULE, seed) == "promote" for seed in range(100)) >= 80


def test_the_interval_is_newcombes() -> None:
    """Table II of the paper, cell (a): 56/70 against 48/80 has the interval 0.0524 to 0.3339."""
    low, high = difference_interval(Successes(48, 80), Successes(56, 70), 2 * norm.cdf(1.959964) - 1)
    assert (low, high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))
    low, high = difference_interval(Successes(0, 10), Successes(10, 10), 0.95)
    assert 0 < low < high <= 1


@pytest.mark.parametrize("wrong", [{"least_runs": 0}, {"looks": 0}, {"confidence": 1.0}, {"margin": -0.1}])
def test_rules_without_sense_are_refused(wrong) -> None:
    with pytest.raises(UserError, match="canary rule"):
        canary_rule(**wrong)
