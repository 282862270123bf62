"""Differences between policies on the same tasks, their intervals, and the gate that asks for them."""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest

from rft_platform.common.errors import UserError
from rft_platform.evaluation.comparison import Comparison, compare, comparisons, distinct, task_means
from rft_platform.evaluation.gate import gate
from rft_platform.evaluation.metrics import paired_interval, paired_share_interval
from rft_platform.evaluation.report import comparison_table
from rft_platform.evaluation.results import EvaluationResult

Make = Callable[..., EvaluationResult]
TASKS = tuple(f"t{i}" for i in range(40))


def scored(make_result: Make, rewards: list[float], version: int, **changes: object) -> EvaluationResult:
    """A result whose tasks have two runs each: with the given reward, and with 0."""
    scores = {"sampled": {task: [reward, 0.0] for task, reward in zip(TASKS, rewards, strict=True)}}
    value = float(np.mean([[reward >= 1, 0.0] for reward in rewards]))
    return make_result(value, version, tasks=TASKS, scores=scores, **changes)


def test_task_difficulty_does_not_widen_the_paired_interval() -> None:
    hard = np.random.default_rng(0).normal(0.0, 5.0, 200)
    gain = np.random.default_rng(1).normal(0.2, 0.1, 200)
    difference, low, high = paired_interval(list(hard + gain), list(hard))
    assert difference == pytest.approx(np.mean(gain))
    spread = 1.96 * np.std(gain) / np.sqrt(200)  # normal theory
    assert (high - low) / 2 == pytest.approx(spread, rel=0.1)
    assert low > 0


def test_the_interval_has_its_nominal_coverage() -> None:
    generator, covered = np.random.default_rng(7), 0
    for _ in range(300):
        better, worse = generator.random(80) < 0.6, generator.random(80) < 0.5
        _, low, high = paired_interval(list(better.astype(float)), list(worse.astype(float)))
        covered += low <= 0.1 <= high
    assert 0.91 <= covered / 300 <= 0.99


@pytest.mark.parametrize("tasks", [1, 2, 3, 4, 5, 6, 8, 12, 20, 50])
@pytest.mark.parametrize(
    "rewards",
    [
        lambda generator, size: generator.normal(size=size),
        lambda generator, size: generator.exponential(size=size),  # skewed
        lambda generator, size: generator.beta(0.2, 0.5, size=size),  # bounded, most of them near a bound
        lambda generator, size: (generator.random(size) < 0.5).astype(float),
    ],
    ids=["normal", "skewed", "bounded", "0 or 1"],
)
def test_policies_with_equal_rewards_seldom_differ_clearly(rewards: Callable[..., np.ndarray], tasks: int) -> None:
    generator, trials = np.random.default_rng(0), 1000
    found = [paired_interval(*rewards(generator, (2, tasks)).tolist()) for _ in range(trials)]
    better = sum(low > 0 for _, low, _ in found) / trials
    assert better <= 0.045, "nominal: 0.025, with a standard error of 0.005"
    assert better == 0 or tasks > 3


def test_few_equal_gains_prove_nothing_and_many_do() -> None:
    for tasks, clear in ((1, False), (2, False), (3, False), (4, True), (40, True)):
        difference, low, high = paired_interval([0.51] * tasks, [0.5] * tasks)
        assert difference == pytest.approx(0.01) and low < 0.01 < high and (low > 0) is clear
    assert paired_interval([0.5], [0.5]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("p", "q", "tasks", "runs"), [(0.6, 0.5, 80, 1), (0.05, 0.02, 40, 1), (0.9, 0.7, 30, 4)])
def test_the_interval_of_two_pass_rates_covers_the_truth(p: float, q: float, tasks: int, runs: int) -> None:
    generator, covered = np.random.default_rng(7), 0
    for _ in range(400):
        better, worse = (generator.binomial(runs, rate, tasks) / runs for rate in (p, q))
        _, low, high = paired_share_interval(list(better), list(worse))
        covered += low <= p - q <= high
    assert covered / 400 >= 0.93


def test_the_interval_of_equal_pass_rates_shrinks_with_the_number_of_tasks() -> None:
    few, many = (paired_share_interval([0.0] * tasks, [0.0] * tasks) for tasks in (5, 600))
    assert few[0] == many[0] == 0.0
    assert few[1] == -few[2]
    assert few[2] > 0.2
    assert 0.0 < many[2] < 0.005
    assert paired_share_interval([1.0] * 2, [0.0] * 2)[1] < 0.0  # two tasks prove nothing
    assert paired_share_interval([1.0] * 10, [0.0] * 10)[1] > 0.4


def test_policies_are_compared_by_every_metric_that_both_have(make_result: Make) -> None:
    start = scored(make_result, [0.0] * 40, 0)
    better = scored(make_result, [1.0] * 30 + [0.5] * 10, 16)
    found = comparisons(better, {"start": start})
    assert [(each.against, each.metric) for each in found] == [("start", "sampled_pass"), ("start", "mean_reward")]
    passes, reward = found
    assert (passes.difference, passes.tasks, passes.verdict) == (0.375, 40, "better")  # 30 of 40, one run of two
    assert reward.difference == pytest.approx(0.4375)
    assert passes.low < 0.375 < passes.high
    assert passes.named()["vs_start/sampled_pass_low"] == passes.low
    assert "start (v0), sampled_pass | +37.5 points (+" in comparison_table(found)
    assert Comparison(**asdict(passes)) == passes
    back = compare(start, better, "sampled_pass", "champion")
    assert back is not None
    assert back.verdict == "worse"
    assert compare(better, better, "sampled_pass", "previous").verdict == "not clearly different"  # type: ignore[union-attr]


def test_a_policy_that_has_two_names_is_shown_once(make_result: Make) -> None:
    start, champion = scored(make_result, [0.0] * 40, 0), scored(make_result, [0.5] * 40, 8)
    found = comparisons(scored(make_result, [1.0] * 40, 16), {"previous": start, "champion": champion, "start": start})
    assert len(found) == 6
    assert [each.against for each in distinct(found)] == ["previous, start"] * 2 + ["champion"] * 2
    assert comparison_table(found).count("previous, start (v0), sampled_pass") == 1


def test_other_tasks_and_missing_modes_are_not_compared(make_result: Make) -> None:
    result = scored(make_result, [1.0] * 40, 8)
    assert compare(result, make_result(0.5, 0), "sampled_pass", "start") is None
    assert compare(result, scored(make_result, [0.0] * 40, 0), "greedy_pass", "start") is None
    assert task_means(result, "greedy_pass") == {}


def test_tasks_are_paired_by_name(make_result: Make) -> None:
    """Runs of task b failed for one policy, and the other evaluated the tasks in another order."""
    result = make_result(1.0, 16, scores={"sampled": {"a": [1.0], "b": [1.0], "c": [1.0]}})
    other = make_result(0.5, 8, scores={"sampled": {"c": [1.0], "a": [0.0]}})
    found = compare(result, other, "sampled_pass", "champion")
    assert found is not None and (found.difference, found.tasks) == (0.5, 2)


def test_a_confident_gate_compares_the_lower_bound(make_result: Make) -> None:
    start = scored(make_result, [0.0] * 40, 0)
    slightly = scored(make_result, [1.0, 1.0, 0.0] + [0.0] * 37, 8)
    clearly = scored(make_result, [1.0] * 40, 8)
    assert gate(slightly, start, confident=False).passed  # the mean alone is better
    doubtful = gate(slightly, start, confident=True, to_beat="start")
    assert not doubtful.passed
    assert "against the start's 0.0000 (policy version 0), difference +0.0250 (95 % -0.0" in doubtful.reason
    assert doubtful.reason.endswith("its lower end must exceed +0.0000")
    assert gate(clearly, start, confident=True, min_delta=0.4).passed
    assert not gate(clearly, start, confident=True, min_delta=0.5).passed
    with pytest.raises(UserError, match=r"evaluation.gate.confident.*sampled_pass, greedy_pass, mean_reward"):
        gate(clearly, start, metric="eval/sums/reward/mean@4", confident=True)
