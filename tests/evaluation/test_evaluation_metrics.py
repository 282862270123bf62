import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from rft_platform.evaluation.metrics import named, pass_rate, run_metrics


def expected_best(runs: list[float], k: int) -> float:
    """Closed form of what the bootstrap estimates: E[max of k draws with replacement]."""
    n, ordered = len(runs), sorted(runs)
    return sum(value * ((rank / n) ** k - ((rank - 1) / n) ** k) for rank, value in enumerate(ordered, start=1))


def test_best_and_worst_agree_with_the_closed_form() -> None:
    generator = random.Random(0)
    scores = {str(task): [generator.random() for _ in range(8 if task % 3 else 5)] for task in range(60)}
    metrics = run_metrics(scores)
    assert list(metrics) == [
        "mean@8",
        "stderr@8",
        "std@8",
        "best@2",
        "worst@2",
        "best@4",
        "worst@4",
        "best@8",
        "worst@8",
    ]
    for k in (2, 4, 8):
        best = np.mean([expected_best(runs, k) for runs in scores.values()])
        worst = -np.mean([expected_best([-score for score in runs], k) for runs in scores.values()])
        assert metrics[f"best@{k}"] == pytest.approx(best, abs=0.02)
        assert metrics[f"worst@{k}"] == pytest.approx(worst, abs=0.02)
    assert metrics["mean@8"] == pytest.approx(np.mean([np.mean(runs) for runs in scores.values()]))
    means = [np.mean(runs) for runs in scores.values()]
    assert metrics["stderr@8"] == pytest.approx(np.std(means, ddof=1) / np.sqrt(len(means)))
    assert metrics["std@8"] == pytest.approx(np.mean([np.std(runs) for runs in scores.values()]))


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=8))
def test_every_statistic_lies_within_the_scores(tables: list[list[float]]) -> None:
    scores = {str(index): runs for index, runs in enumerate(tables)}
    metrics = run_metrics(scores)
    n = max(map(len, tables))
    assert min(map(min, tables)) - 1e-9 <= metrics[f"mean@{n}"] <= max(map(max, tables)) + 1e-9
    if n > 1:
        assert metrics[f"worst@{n}"] - 1e-9 <= metrics[f"mean@{n}"] + 2 * 5 * 0.2
        assert metrics[f"worst@{n}"] <= metrics["worst@2"] + 1e-9 or n == 2
        assert metrics["best@2"] >= metrics["worst@2"] - 1e-9


def test_one_run_a_task_has_only_a_mean_with_its_standard_error() -> None:
    assert run_metrics({"a": [1.0], "b": [0.0]}) == {"mean@1": 0.5, "stderr@1": 0.5}
    assert run_metrics({}) == {}
    assert list(run_metrics({"a": [1.0, 0.0, 0.0]})) == ["mean@3", "std@3", "best@2", "worst@2", "best@3", "worst@3"]


def test_equal_seeds_give_equal_numbers() -> None:
    scores = {str(task): [float(task % 3 == run % 2) for run in range(4)] for task in range(50)}
    assert run_metrics(scores) == run_metrics(scores)
    assert pass_rate(scores) == pass_rate(scores)


def test_the_interval_is_that_of_a_binomial() -> None:
    scores = {str(task): [float(task % 4 != 0)] for task in range(600)}
    rate = pass_rate(scores)
    error = 1.96 * math.sqrt(0.75 * 0.25 / 600)
    assert (rate.value, rate.tasks, rate.runs) == (0.75, 600, 600)
    assert rate.low == pytest.approx(0.75 - error, abs=0.008)
    assert rate.high == pytest.approx(0.75 + error, abs=0.008)


def test_tasks_have_equal_weights_and_the_threshold_tolerates_rounding() -> None:
    rate = pass_rate({"a": [0.1 + 0.2 + 0.7 - 1e-12], "b": [0.0, 0.0, 1.0, 1.5]})
    assert rate.value == 0.75
    assert pass_rate({"a": [0.6]}, threshold=0.5).value == 1.0
    with pytest.raises(ValueError, match="no tasks"):
        pass_rate({})


@pytest.mark.parametrize("passed", [0, 1, 10, 19, 20])
def test_one_run_a_task_has_the_interval_of_wilson(passed: int) -> None:
    rate = pass_rate({str(task): [float(task < passed)] for task in range(20)})
    expected = binomtest(passed, 20).proportion_ci(method="wilson")
    assert (rate.low, rate.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert rate.low <= rate.value <= rate.high


def test_equal_runs_of_a_task_count_as_one() -> None:
    one, many = (pass_rate({str(task): [0.0] * runs for task in range(20)}) for runs in (1, 8))
    assert (one.low, one.high) == (many.low, many.high)
    assert one.high > 0.15
    alike = pass_rate({str(task): [float(task < 10)] * 8 for task in range(20)})
    apart = pass_rate({str(task): [float((task + run) % 2) for run in range(8)] for task in range(20)})
    assert alike.high - alike.low > 0.35  # 20 independent outcomes
    assert apart.value == alike.value == 0.5


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (2.0, 8.0), (0.2, 6.0), (20.0, 1.0)])
def test_clustered_runs_are_covered(alpha: float, beta: float) -> None:
    """Tasks of unlike difficulty (beta-binomial): the interval holds the true rate about as often as it says."""
    generator, truth, covered = np.random.default_rng(3), alpha / (alpha + beta), 0
    for _ in range(400):
        difficulty = generator.beta(alpha, beta, 40)
        rate = pass_rate({str(t): list((generator.random(4) < p).astype(float)) for t, p in enumerate(difficulty)})
        covered += rate.low <= truth <= rate.high
    assert covered / 400 >= 0.92


def test_names() -> None:
    assert named("gsm8k", "reward", {"mean@4": 0.5}) == {"eval/gsm8k/reward/mean@4": 0.5}
