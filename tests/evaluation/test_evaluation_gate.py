from collections.abc import Callable
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.schema.evaluation import Gate, Regression
from rft_platform.evaluation.gate import compare_with_start, gate, promotion_rule
from rft_platform.evaluation.results import EvaluationResult

Make = Callable[..., EvaluationResult]


def test_the_first_candidate_passes_if_it_is_good_enough(make_result: Make) -> None:
    assert gate(make_result(0.4), None).passed
    assert gate(make_result(0.4), None, min_value=0.4).passed
    assert gate(make_result(0.4, round=0), None).reason == "sampled_pass 0.4000; this is the start"
    refused = gate(make_result(0.4), None, min_value=0.5)
    assert not refused.passed
    assert refused.reason == "sampled_pass 0.4000 is below the required 0.5000"


def test_the_champion_must_be_reached_by_the_margin(make_result: Make) -> None:
    champion = make_result(0.5, 8)
    assert gate(make_result(0.53, 16), champion, min_delta=0.02, confident=False).passed
    refused = gate(make_result(0.51, 16), champion, min_delta=0.02, confident=False)
    assert not refused.passed
    assert refused.reason == "sampled_pass 0.5100 against the champion's 0.5000 (policy version 8): needs 0.5200"
    assert not gate(make_result(0.55, 16), champion, min_value=0.6).passed


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("confident", [True, False])
def test_a_tie_promotes_nothing(make_result: Make, rate: float, confident: bool) -> None:
    decision = gate(make_result(rate, 16), make_result(rate, 8), confident=confident)
    assert not decision.passed
    assert decision.reason.endswith("its lower end must exceed +0.0000" if confident else "no gain")
    assert gate(make_result(rate, 16), make_result(rate, 8), confident=False, min_delta=-0.01).passed  # on request


@pytest.mark.parametrize(
    ("rate", "settings", "summary"),
    [
        (0.51, {"min_delta": 0.02, "confident": False}, "+1.0 points, not +2.0 points better than v8"),
        (0.4, {"min_delta": -0.02, "confident": False}, "-10.0 points, perhaps more than 2.0 points worse than v8"),
        (0.4, {"confident": False}, "-10.0 points, not better than v8"),
        (0.5, {}, "+0.0 points, not better than v8"),
    ],
)
def test_a_refusal_has_a_summary_of_a_few_words(
    make_result: Make, rate: float, settings: dict[str, Any], summary: str
) -> None:
    decision = gate(make_result(rate, 16), make_result(0.5, 8), **settings)
    assert (decision.passed, decision.summary) == (False, summary)


def test_a_gain_within_the_noise_is_not_clearly_better(make_result: Make) -> None:
    some, none = {"sampled": {"a": [1.0], "b": [0.0]}}, {"sampled": {"a": [0.0], "b": [0.0]}}
    decision = gate(make_result(0.5, 16, scores=some), make_result(0.0, 8, scores=none))
    assert (decision.passed, decision.summary) == (False, "+50.0 points, not clearly better than v8")


TASKS = tuple(f"t{number}" for number in range(100))


def with_failures(make_result: Make, version: int, passed: int, failed: int) -> EvaluationResult:
    """One sampled run of each task: the first ones pass, the last ones fail to end, the others are wrong."""
    runs = {task: [float(number < passed)] for number, task in enumerate(TASKS[: len(TASKS) - failed])}
    rate = passed / len(runs)
    return make_result(rate, version, tasks=TASKS, scores={"sampled": runs}, failed_runs=failed, mean_reward=rate)


@pytest.mark.parametrize("settings", [{}, {"confident": False}, {"metric": "mean_reward"}])
def test_a_policy_whose_runs_fail_is_not_promoted_for_the_others(make_result: Make, settings: dict[str, Any]) -> None:
    champion = with_failures(make_result, 8, passed=70, failed=0)
    refused = gate(with_failures(make_result, 16, passed=50, failed=50), champion, **settings)
    assert not refused.passed
    assert refused.reason == (
        "50.0% of its runs failed, 0.0% of the champion's (policy version 8): failed runs have no score"
    )
    assert gate(with_failures(make_result, 16, passed=90, failed=5), champion, **settings).passed, "some always may"
    flaky = with_failures(make_result, 8, passed=40, failed=30)
    assert gate(with_failures(make_result, 16, passed=65, failed=34), flaky, **settings).passed, "as of the champion"


@pytest.mark.parametrize("to_beat", ["champion", "start"])
@pytest.mark.parametrize("metric", ["sampled_pass", "mean_reward"])
def test_a_task_whose_run_failed_counts_for_neither_policy(make_result: Make, metric: str, to_beat: str) -> None:
    """The answers are the same, but for a wrong one whose run now failed, and a right one that is wrong now."""
    before = with_failures(make_result, 8, passed=50, failed=0)
    runs = {task: [float(0 < number < 50)] for number, task in enumerate(TASKS[:99])}
    rate = 49 / 99
    after = make_result(rate, 16, tasks=TASKS, scores={"sampled": runs}, failed_runs=1, mean_reward=rate)
    for confident in (True, False):
        found = gate(after, before, metric=metric, confident=confident, to_beat=to_beat, min_delta=-0.009)
        assert not found.passed and found.summary.startswith("-1.0 " if metric == "sampled_pass" else "-0.0101")
        assert found.reason.startswith(
            f"{metric} 0.4949 against the {to_beat}'s 0.5051 on the 99 tasks that both have (policy version 8)"
        )
    same = with_failures(make_result, 16, passed=50, failed=1)
    assert not gate(same, before, metric=metric, confident=False).passed, (
        "a share of 50 of 99 is no gain over 50 of 100"
    )
    apart = make_result(1.0, 16, tasks=TASKS[:2], scores={"sampled": {"t0": [1.0]}}, failed_runs=1)
    other = make_result(0.0, 8, tasks=TASKS[:2], scores={"sampled": {"t1": [0.0]}}, failed_runs=1)
    assert gate(apart, other, metric=metric, confident=False).reason.startswith("no task has a score by")


def test_the_regression_set_refuses_a_policy_whose_runs_fail(make_result: Make) -> None:
    start = with_failures(make_result, 0, passed=70, failed=0)
    candidate = with_failures(make_result, 16, passed=50, failed=50)
    found = compare_with_start(candidate, start, Regression(taskset="general"))
    assert not found.decision.passed
    assert found.decision.reason.startswith("regression set general: 50.0% of its runs failed, 0.0% of the start's")


def test_the_rule_is_one_sentence() -> None:
    assert promotion_rule(Gate()) == (
        "a version becomes champion if the 95 % interval of the gain over the champion in sampled_pass lies above 0"
    )
    assert promotion_rule(Gate(confident=False, min_delta=0.02)) == (
        "a version becomes champion if the gain over the champion in sampled_pass is at least +2.0 points"
    )
    assert promotion_rule(Gate(), first=True) == (
        "a version becomes the first champion if the gain over the start in sampled_pass is at least 0"
    )
    assert promotion_rule(Gate(confident=True, min_delta=0.02), first=True) == (
        "a version becomes the first champion if the 95 % interval of the gain over the start in sampled_pass lies "
        "above +2.0 points"
    )


def test_before_the_first_promotion_a_tie_with_the_start_passes(make_result: Make) -> None:
    start = make_result(0.5)
    assert gate(make_result(0.5, 16), start, confident=False, to_beat="start").passed
    assert not gate(make_result(0.4, 16), start, confident=False, to_beat="start").passed
    assert not gate(make_result(0.5, 16), start, to_beat="start").passed, "the interval is about 0"


def test_the_interval_decides_by_default_if_there_is_one() -> None:
    assert Gate().needs_interval
    assert not Gate(confident=False).needs_interval
    assert not Gate(metric="eval/sums/reward/mean@4").needs_interval


def test_any_measured_metric_can_decide(make_result: Make) -> None:
    candidate, champion = make_result(0.7, 16), make_result(0.5)
    assert gate(candidate, champion, metric="eval/sums/reward/best@2", min_delta=0.2, confident=False).passed
    with pytest.raises(UserError, match=r"'greedy_pass' was not measured.*sampled_pass"):
        gate(candidate, champion, metric="greedy_pass")
    with pytest.raises(UserError, match="'failed_runs' was not measured") as refused:
        gate(candidate, None, metric="failed_runs")
    assert "truncated_share" not in str(refused.value)


def test_what_cannot_be_compared_does_not_pass(make_result: Make) -> None:
    other_tasks = gate(make_result(0.9, 16), make_result(0.5, tasks=("a", "c")))
    assert (other_tasks.passed, "measured on other tasks" in other_tasks.reason) == (False, True)
    assert not gate(make_result(0.9, mean_reward=float("nan")), None, metric="mean_reward").passed
