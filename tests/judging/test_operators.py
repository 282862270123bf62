"""Operators before advantages: what each keeps, drops and adds, and what is told of it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.experience.record import RolloutRow
from rft_platform.judging.execution.compose import JudgeSpec, build_judge
from rft_platform.judging.execution.experience_pipeline import JUDGED, Operator, Pipeline
from rft_platform.judging.execution.judge_rollouts import JUDGE_ERROR, JudgedRollouts, judge_rollouts
from rft_platform.judging.operators.filters import DYNAMIC_SAMPLING, REWARD_FILTER, STD_FILTER, SURPLUS_GROUPS
from rft_platform.judging.operators.rewards import OVERLONG, penalty
from rft_platform.tasks.task import Task
from tests.experience.samples import step_row

TASKS = {f"t{i}": Task(f"t{i}", "sums", f"{i}+{i}", str(2 * i), {"answer": str(2 * i)}) for i in range(3)}


def row(task: int, run: int, text: str, *, length: int = 1, step: int = 0, state: str | None = None) -> RolloutRow:
    return step_row(
        f"g{task}-{run}", step, response_ids=[2] * length, task_id=f"t{task}", taskset="sums", group_id=f"g{task}",
        response={"role": "assistant", "content": text}, env_state_hash=state,
    )  # fmt: skip


def pipeline(*operators: tuple[str, dict[str, Any]]) -> Pipeline:
    return Pipeline.of([Operator(name, args) for name, args in operators])


def overlong(weight: float, max_length: int, cache_length: int) -> tuple[str, dict[str, Any]]:
    return "overlong_penalty", {"weight": weight, "max_length": max_length, "cache_length": cache_length}


def judged(
    rows: list[RolloutRow], operators: Pipeline, advantage: str | None = "grpo", wanted: int | None = None
) -> JudgedRollouts:
    return judge_rollouts(
        rows, TASKS, build_judge("exact_match"), advantage_fn=advantage, pipeline=operators, wanted_groups=wanted
    )


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 1000))
def test_the_penalty_is_the_formula(longest: int, cache: int, length: int) -> None:
    cache = min(cache, longest)
    got = penalty(np.array([length]), longest, cache)[0]
    if length <= longest - cache:
        want = 0.0
    elif length <= longest:
        want = ((longest - cache) - length) / cache
    else:
        want = -1.0
    assert got == pytest.approx(want, abs=1e-12)


def test_the_penalty_of_the_paper() -> None:
    lengths = np.array([100, 16384, 18432, 20480, 30000])
    np.testing.assert_allclose(penalty(lengths, 20480, 4096), [0, 0, -0.5, -1, -1])


def test_the_penalty_is_a_part_of_the_reward() -> None:
    rows = [row(1, 0, "2", length=10), row(1, 1, "2", length=8), row(1, 2, "x", length=4)]
    found = judged(rows, pipeline(overlong(0.5, 10, 4)))
    assert [r.reward for r in found.rows] == pytest.approx([0.5, 0.75, 0.0])
    assert [r.reward_parts[OVERLONG] for r in found.rows] == pytest.approx([-0.5, -0.25, 0.0])
    assert found.rows[0].reward_parts["exact_match"] == 1.0
    rewards = np.array([0.5, 0.75, 0.0])
    want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [r.advantage for r in found.rows] == pytest.approx(want.tolist())


def test_the_longest_response_of_a_run_counts() -> None:
    rows = [row(1, 0, "a", length=10), row(1, 0, "2", length=2, step=1), row(1, 1, "2", length=2)]
    found = judged(rows, pipeline(overlong(1.0, 10, 5)), "step_wise_grpo")
    assert [r.reward for r in found.rows] == pytest.approx([0.0, 0.0, 1.0])


def test_groups_without_variance_are_left_out_whatever_their_lengths() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "2", length=10), row(2, 0, "4"), row(2, 1, "x"), row(0, 0, "y"), row(0, 1, "y")]
    found = judged(rows, pipeline(("dynamic_sampling", {}), overlong(1.0, 10, 5)))
    assert [r.dropped_by for r in found.rows] == [DYNAMIC_SAMPLING] * 2 + [None] * 2 + [DYNAMIC_SAMPLING] * 2
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [r.advantage for r in found.rows] == pytest.approx([0, 0, half, -half, 0, 0])
    kept = judged(rows, pipeline())
    assert all(r.dropped_by is None for r in kept.rows)


def test_runs_below_the_threshold_are_left_out() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "3"), row(1, 1, "5", step=1), row(2, 0, "4")]
    found = judged(rows, pipeline(("reward_filter", {"threshold": 1.0})), None)
    assert [r.dropped_by for r in found.rows] == [None, REWARD_FILTER, REWARD_FILTER, None]
    assert [r.reward for r in found.rows] == [1.0, 0.0, 0.0, 1.0]


def test_rounding_of_a_sum_of_weights_does_not_move_a_run_across_a_threshold() -> None:
    def weighted(task: dict[str, str], response: str) -> float:
        return 0.7 + 0.2 + 0.1 if response == task["answer"] else 0.1 + 0.2

    assert weighted({"answer": "2"}, "2") < 1.0 and weighted({"answer": "2"}, "x") > 0.3
    rows = [row(1, 0, "2"), row(1, 1, "x")]
    for limits, dropped in (({"threshold": 1.0}, [None, REWARD_FILTER]), ({"max_reward": 0.3}, [REWARD_FILTER, None])):
        given = pipeline(("reward_filter", limits), ("pass_rate_calculator", {}))
        found = judge_rollouts(rows, TASKS, build_judge(weighted), advantage_fn=None, pipeline=given)
        assert [r.dropped_by for r in found.rows] == dropped
        assert [r.reward_parts["passed"] for r in found.rows] == [1.0, 0.0]


def test_groups_that_differ_too_little_are_left_out_of_advantages_and_training() -> None:
    """Standard deviations 0, sqrt(1/2) and sqrt(1/3): over runs, not over rows."""
    rows = [row(1, 0, "2"), row(1, 1, "2"), row(2, 0, "x"), row(2, 0, "4", step=1), row(2, 1, "x")]
    rows += [row(0, 0, "0"), row(0, 1, "x"), row(0, 2, "x")]
    for threshold, kept in ((0.0, [2, 3, 4, 5, 6, 7]), (0.6, [2, 3, 4]), (0.7072, [])):
        found = judge_rollouts(
            rows,
            TASKS,
            build_judge("exact_match"),
            advantage_fn="step_wise_grpo",
            advantage_args={"std_threshold": threshold},
            pipeline=pipeline(("std_filter", {"threshold": threshold})),
        )
        assert [i for i, r in enumerate(found.rows) if r.dropped_by is None] == kept
        assert {r.dropped_by for i, r in enumerate(found.rows) if i not in kept} == {STD_FILTER}
        assert [i for i, r in enumerate(found.rows) if r.advantage != 0] == kept


def test_the_standard_deviation_is_that_of_what_is_learned_from() -> None:
    """The penalty makes the rewards differ; the run below the threshold of rewards no longer counts."""
    rows = [row(1, 0, "2"), row(1, 1, "2", length=10), row(2, 0, "4"), row(2, 1, "4"), row(2, 2, "x")]
    given = pipeline(overlong(0.5, 10, 5), ("reward_filter", {"threshold": 0.25}), ("std_filter", {"threshold": 0.1}))
    found = judged(rows, given, "step_wise_grpo")
    assert [r.dropped_by for r in found.rows] == [None, None, STD_FILTER, STD_FILTER, REWARD_FILTER]


def test_a_failed_judge_counts_before_the_filters() -> None:
    def fails_on_x(task: dict[str, str], response: str) -> float:
        if response == "x":
            raise RuntimeError("no verdict")
        return float(response == task["answer"])

    rows = [row(1, 0, "2"), row(1, 1, "2"), row(1, 2, "x"), row(2, 0, "4"), row(2, 1, "3"), row(2, 2, "x")]
    spec: JudgeSpec = build_judge(fails_on_x)
    found = judge_rollouts(rows, TASKS, spec, advantage_fn="grpo", pipeline=pipeline(("dynamic_sampling", {})))
    assert [r.dropped_by for r in found.rows] == [DYNAMIC_SAMPLING] * 2 + [JUDGE_ERROR] + [None] * 2 + [JUDGE_ERROR]


def test_states_of_the_environment_reach_the_advantage() -> None:
    rows = [row(1, 0, "2", state="s"), row(1, 1, "x", state="s"), row(1, 2, "x", state="other")]
    found = judged(rows, pipeline(), "gigpo")
    third = 1 / 3
    assert [r.advantage for r in found.rows] == pytest.approx([2 * third + 0.5, -third - 0.5, -third])


def test_without_need_of_a_reward_nothing_has_to_give_one() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "3")]
    found = judge_rollouts(rows, TASKS, None, advantage_fn=None, needs_reward=False)
    assert [r.reward for r in found.rows] == [0.0, 0.0]
    with pytest.raises(UserError, match="has no reward"):
        judge_rollouts(rows, TASKS, None, advantage_fn=None)


@pytest.mark.parametrize(("longest", "cache"), [(10, 11), (10, 0)])
def test_lengths_that_make_no_sense_are_refused(longest: int, cache: int) -> None:
    with pytest.raises(UserError, match=r"expected 0 < cache_length <= max_length"):
        penalty(np.array([1]), longest, cache)


def test_a_missing_option_is_refused() -> None:
    with pytest.raises(UserError, match="needs the arguments max_length, cache_length; got max_length"):
        pipeline(("overlong_penalty", {"max_length": 100}))


def test_every_operator_reports_its_input_and_output_counts() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "x", length=9), row(2, 0, "4"), row(2, 0, "4", step=1), row(2, 1, "4")]
    given = pipeline(overlong(1.0, 10, 5), ("dynamic_sampling", {}), ("reward_filter", {"threshold": 0.5}))
    found = judged(rows, given)
    assert [report.name for report in found.operators] == ["overlong_penalty", "dynamic_sampling", "reward_filter"]
    counts = [(r.rows_in, r.rows_out, r.runs_in, r.runs_out, r.groups_in, r.groups_out) for r in found.operators]
    assert counts == [(5, 5, 4, 4, 2, 2), (5, 2, 4, 2, 2, 1), (2, 1, 2, 1, 1, 1)]
    assert found.operators[1].facts == {"groups_without_signal": 1.0}
    assert [r.dropped_by for r in found.rows] == [None, REWARD_FILTER] + [DYNAMIC_SAMPLING] * 3
    assert found.operators[0].facts == {"penalised_runs": 1.0}


def test_what_an_operator_changes_leaves_the_judges_reward_to_be_read() -> None:
    rows = [row(1, 0, "2", length=3), row(1, 1, "x", length=2)]
    rows[0].call.metrics = {"tools": 2.0}
    add = {"response_tokens": -0.01, "metrics.tools": 0.5, "parts.exact_match": 1.0}
    found = judged(rows, pipeline(("reward_shaping", {"add": add, "scale": 2.0, "offset": 0.25})))
    assert [r.reward for r in found.rows] == pytest.approx([2.25 - 0.03 + 1.0 + 1.0, 0.25 - 0.02])
    assert [r.reward_parts[JUDGED] for r in found.rows] == [1.0, 0.0]
    assert [r.reward_parts["shaping"] for r in found.rows] == pytest.approx([3.22, 0.23])
    clipped = judged(rows, pipeline(("reward_shaping", {"add": add, "clip": [0.0, 1.5]})))
    assert [r.reward for r in clipped.rows] == [1.5, 0.0]
    assert JUDGED not in judged(rows, pipeline(("std_filter", {}))).rows[0].reward_parts


@pytest.mark.parametrize("name", ["metrics.tool", "parts.exactmatch"])
def test_a_part_or_metric_that_no_run_has_counts_as_zero(name: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(1, 0, "2"), row(1, 1, "x")]
    rows[0].call.metrics = {"tools": 2.0}
    found = judged(rows, pipeline(("reward_shaping", {"add": {name: 1.0}})))
    assert [r.reward for r in found.rows] == [1.0, 0.0]
    (warning,) = caplog.messages
    assert f"no run has {name}, which counts as 0; unknown measure" in warning
    assert "did you mean 'metrics.tools'" in warning or "did you mean 'parts.exact_match'" in warning


@pytest.mark.parametrize("answers", [["2", "x"], []])
def test_a_measure_that_does_not_exist_is_refused(answers: list[str]) -> None:
    rows = [row(1, run, answer) for run, answer in enumerate(answers)]
    with pytest.raises(UserError, match=r"unknown measure .*'response_token': did you mean 'response_tokens'"):
        judged(rows, pipeline(("reward_shaping", {"add": {"response_token": 1.0}})))


def test_runs_that_nothing_can_be_learned_from_are_left_out() -> None:
    rows = [row(1, 0, "2"), row(1, 1, " "), row(1, 2, "x", length=9), row(2, 0, "4"), row(2, 0, "4", step=1)]
    found = judged(rows, pipeline(("invalid_filter", {"max_response_tokens": 8, "max_calls": 1})), None)
    assert [r.dropped_by for r in found.rows] == [None] + ["invalid_filter"] * 4
    assert found.operators[0].facts == {"not_finite": 0.0, "empty": 1.0, "too_long": 1.0, "too_many_calls": 1.0}
    choices = [replace(rows[0], row_id=f"choice-{number}") for number in range(3)]
    chosen = judged(
        choices, pipeline(("invalid_filter", {"max_calls": 1}), ("reward_shaping", {"add": {"calls": -0.1}}))
    )
    assert [(r.dropped_by, r.reward) for r in chosen.rows] == [(None, pytest.approx(0.9))] * 3
    with_calls = [row(1, 0, "2"), row(1, 1, "")]
    with_calls[1].response["tool_calls"] = [{"function": {"name": "add", "arguments": "{}"}}]
    assert all(r.dropped_by is None for r in judged(with_calls, pipeline(("invalid_filter", {}))).rows)


def test_truncated_responses_are_masked_left_out_or_penalised() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "x"), row(1, 1, "x", step=1), row(1, 2, "2")]
    rows[2].truncated = True
    masked = judged(rows, pipeline(("truncated_mask", {})), "step_wise_grpo").rows
    assert [r.dropped_by for r in masked] == [None, None, "truncated_mask", None]
    assert [r.masked for r in masked] == [False, False, True, False]
    whole = judged(rows, pipeline(), "step_wise_grpo").rows
    assert [r.advantage for r in masked] == [whole[0].advantage, whole[1].advantage, 0.0, whole[3].advantage]
    dropped = judged(rows, pipeline(("truncated_mask", {"mode": "drop"})), "step_wise_grpo").rows
    assert [r.dropped_by for r in dropped] == [None, "truncated_mask", "truncated_mask", None]
    assert not any(r.masked for r in dropped), "a dropped run counts nowhere"
    assert [r.advantage for r in dropped] == [0.0] * 4, "the runs that are left all have the same reward"
    lower = judged(rows, pipeline(("truncated_mask", {"mode": "penalise", "penalty": 0.5})), "step_wise_grpo").rows
    assert [r.reward for r in lower] == [1.0, -0.5, -0.5, 1.0]
    assert lower[1].reward_parts["truncated"] == -0.5


def test_pass_rates_are_kept_beside_the_rewards() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "x"), row(2, 0, "4"), row(0, 0, "x")]
    given = pipeline(overlong(1.0, 2, 2), ("reward_filter", {"threshold": 0.1}), ("pass_rate_calculator", {}))
    found = judged(rows, given)
    assert [r.reward_parts["passed"] for r in found.rows] == [1.0, 0.0, 1.0, 0.0]
    assert [r.reward_parts["pass_rate"] for r in found.rows] == [0.5, 0.5, 1.0, 0.0]
    assert found.operators[-1].facts == {"pass_rate": 0.5, "solved_tasks": 1.0, "unsolved_tasks": 1.0}


def test_surplus_groups_are_the_last_sampled() -> None:
    rows = [
        row(0, 0, "x"),
        row(0, 1, "x"),
        *(row(task, run, str(2 * task) if run else "x") for task in (2, 1) for run in (0, 1)),
    ]
    given = pipeline(("dynamic_sampling", {"max_batches": 2}), (SURPLUS_GROUPS, {}))
    one = judged(rows, given, wanted=1)
    assert [r.dropped_by for r in one.rows] == [DYNAMIC_SAMPLING] * 2 + [None] * 2 + [SURPLUS_GROUPS] * 2
    assert one.operators[-1].facts == {"surplus_groups": 1.0}
    for wanted in (2, 3, None):
        assert [r.dropped_by for r in judged(rows, given, wanted=wanted).rows][2:] == [None] * 4


OWN = """
import numpy as np
from rft_platform.judging.operators.registry import Change

def shorter_half(experiences, *, share: float = 0.5):
    limit = np.quantile(experiences.tokens_R, share)
    return Change(drop=experiences.tokens_R > limit, facts={"limit": limit})

def breaks(experiences):
    raise RuntimeError("no luck")

def not_a_number(experiences):
    return Change(reward=experiences.reward_R * float("nan"))

def wrong_shape(experiences):
    return Change(drop=np.zeros(1, bool))

def nothing(experiences):
    return None
"""


def test_operators_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "own_operators.py"
    file.write_text(OWN)
    rows = [row(1, 0, "2", length=2), row(1, 1, "x", length=6), row(2, 0, "4", length=9), row(2, 1, "x", length=1)]
    name = f"{file}:shorter_half"
    given = pipeline((name, {"share": 0.5}))
    found = judged(rows, given)
    assert [r.dropped_by for r in found.rows] == [None, name, name, None]
    assert found.operators[0].facts == {"limit": 4.0}
    assert given.version != pipeline((name, {"share": 0.6})).version
    with pytest.raises(UserError, match="did you mean 'share'"):
        pipeline((name, {"shares": 0.5}))
    for function, said in (
        ("breaks", r"failed: RuntimeError: no luck \(.*own_operators.py:10"),
        ("not_a_number", "4 runs with a reward that is not finite"),
        ("wrong_shape", r"drop has the shape \(1,\), expected \(4,\): one value a run"),
        ("nothing", "returned NoneType, expected a Change"),
    ):
        with pytest.raises(UserCodeError, match=said):
            judged(rows, pipeline((f"{file}:{function}", {})))
    mended = judged(rows, pipeline((f"{file}:not_a_number", {}), ("invalid_filter", {})))
    assert {r.dropped_by for r in mended.rows} == {"invalid_filter"}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(-1, 1), st.integers(0, 12), st.booleans()), min_size=1, max_size=24
    ),
    st.permutations(["dynamic_sampling", "std_filter", "truncated_mask", "reward_filter", "overlong_penalty"]),
)
def test_counts_add_up_in_any_order(runs: list[tuple[int, float, int, bool]], names: list[str]) -> None:
    args: dict[str, dict[str, Any]] = {
        "reward_filter": {"threshold": 0.0},
        "overlong_penalty": {"max_length": 10, "cache_length": 4},
    }
    rows = []
    for index, (task, reward, length, truncated) in enumerate(runs):
        rows.append(row(task, index, "x", length=length))
        rows[-1].truncated, rows[-1].run_reward, rows[-1].task_id = truncated, reward, "t0"
    found = judge_rollouts(
        rows, TASKS, None, advantage_fn="grpo", pipeline=pipeline(*((name, args.get(name, {})) for name in names))
    )
    assert [report.rows_in for report in found.operators[1:]] == [report.rows_out for report in found.operators[:-1]]
    for report in found.operators:
        gone = sum(r.dropped_by == report.name for r in found.rows)
        assert report.rows_in - report.rows_out == gone
    assert all(r.advantage == 0.0 for r in found.rows if r.dropped_by is not None)
    assert found.operators[-1].rows_out == sum(r.dropped_by is None for r in found.rows)
