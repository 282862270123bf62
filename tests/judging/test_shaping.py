"""Rewards before advantages: the soft over-long penalty, groups without variance, the reward threshold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.errors import UserError
from rft_platform.experience.record import RolloutRow, row_id
from rft_platform.judging.apply import JUDGE_ERROR, JudgedRollouts, judge_rollouts
from rft_platform.judging.compose import JudgeSpec, build_judge
from rft_platform.judging.shaping import OVERLONG, REWARD_THRESHOLD, STD_THRESHOLD, ZERO_VARIANCE, Overlong, Shaping
from rft_platform.tasks.task import Task

TASKS = {f"t{i}": Task(f"t{i}", "sums", f"{i}+{i}", str(2 * i), {"answer": str(2 * i)}) for i in range(3)}


def row(task: int, run: int, text: str, *, length: int = 1, step: int = 0, state: str | None = None) -> RolloutRow:
    run_id = f"g{task}-{run}"
    return RolloutRow(
        row_id=row_id(run_id, step),
        task_id=f"t{task}",
        taskset="sums",
        group_id=f"g{task}",
        run_id=run_id,
        step=step,
        msg_id="m",
        round=1,
        policy_version=0,
        engine="test",
        template_hash="h",
        prompt_ids=[1],
        response_ids=[2] * length,
        logprobs=[-0.1] * length,
        loss_mask=[True] * length,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        finish_reason="stop",
        truncated=False,
        messages=[],
        tools=[],
        response={"role": "assistant", "content": text},
        env_state_hash=state,
    )


def judged(rows: list[RolloutRow], shaping: Shaping, advantage: str | None = "grpo") -> JudgedRollouts:
    return judge_rollouts(rows, TASKS, build_judge("exact_match"), advantage_fn=advantage, shaping=shaping)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 1000))
def test_the_penalty_is_the_formula(longest: int, cache: int, length: int) -> None:
    cache = min(cache, longest)
    got = Overlong(1.0, longest, cache).penalty(np.array([length]))[0]
    if length <= longest - cache:
        want = 0.0
    elif length <= longest:
        want = ((longest - cache) - length) / cache
    else:
        want = -1.0
    assert got == pytest.approx(want, abs=1e-12)


def test_the_penalty_of_the_paper() -> None:
    dapo = Overlong(1.0, 20480, 4096)
    np.testing.assert_allclose(dapo.penalty(np.array([100, 16384, 18432, 20480, 30000])), [0, 0, -0.5, -1, -1])


def test_the_penalty_is_a_part_of_the_reward() -> None:
    rows = [row(1, 0, "2", length=10), row(1, 1, "2", length=8), row(1, 2, "x", length=4)]
    found = judged(rows, Shaping(overlong=Overlong(0.5, 10, 4)))
    assert [r.reward for r in found.rows] == pytest.approx([0.5, 0.75, 0.0])
    assert [r.reward_parts[OVERLONG] for r in found.rows] == pytest.approx([-0.5, -0.25, 0.0])
    assert found.rows[0].reward_parts["exact_match"] == 1.0
    rewards = np.array([0.5, 0.75, 0.0])
    want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [r.advantage for r in found.rows] == pytest.approx(want.tolist())


def test_the_longest_response_of_a_run_counts() -> None:
    rows = [row(1, 0, "a", length=10), row(1, 0, "2", length=2, step=1), row(1, 1, "2", length=2)]
    found = judged(rows, Shaping(overlong=Overlong(1.0, 10, 5)), "step_wise_grpo")
    assert [r.reward for r in found.rows] == pytest.approx([0.0, 0.0, 1.0])


def test_groups_without_variance_are_left_out_whatever_their_lengths() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "2", length=10), row(2, 0, "4"), row(2, 1, "x"), row(0, 0, "y"), row(0, 1, "y")]
    found = judged(rows, Shaping(Overlong(1.0, 10, 5), drop_zero_variance=True))
    assert [r.dropped_by for r in found.rows] == [ZERO_VARIANCE] * 2 + [None] * 2 + [ZERO_VARIANCE] * 2
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [r.advantage for r in found.rows] == pytest.approx([0, 0, half, -half, 0, 0])
    kept = judged(rows, Shaping())
    assert all(r.dropped_by is None for r in kept.rows)


def test_runs_below_the_threshold_are_left_out() -> None:
    rows = [row(1, 0, "2"), row(1, 1, "3"), row(1, 1, "5", step=1), row(2, 0, "4")]
    found = judged(rows, Shaping(reward_threshold=1.0), None)
    assert [r.dropped_by for r in found.rows] == [None, REWARD_THRESHOLD, REWARD_THRESHOLD, None]
    assert [r.reward for r in found.rows] == [1.0, 0.0, 0.0, 1.0]


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
            shaping=Shaping(std_threshold=threshold),
        )
        assert [i for i, r in enumerate(found.rows) if r.dropped_by is None] == kept
        assert {r.dropped_by for i, r in enumerate(found.rows) if i not in kept} == {STD_THRESHOLD}
        assert [i for i, r in enumerate(found.rows) if r.advantage != 0] == kept


def test_the_standard_deviation_is_that_of_what_is_learned_from() -> None:
    """The penalty makes the rewards differ; the run below the threshold of rewards no longer counts."""
    rows = [row(1, 0, "2"), row(1, 1, "2", length=10), row(2, 0, "4"), row(2, 1, "4"), row(2, 2, "x")]
    shaping = Shaping(Overlong(0.5, 10, 5), reward_threshold=0.25, std_threshold=0.1)
    found = judged(rows, shaping, "step_wise_grpo")
    assert [r.dropped_by for r in found.rows] == [None, None, STD_THRESHOLD, STD_THRESHOLD, REWARD_THRESHOLD]


def test_a_failed_judge_counts_before_the_filters() -> None:
    def fails_on_x(task: dict[str, str], response: str) -> float:
        if response == "x":
            raise RuntimeError("no verdict")
        return float(response == task["answer"])

    rows = [row(1, 0, "2"), row(1, 1, "2"), row(1, 2, "x"), row(2, 0, "4"), row(2, 1, "3"), row(2, 2, "x")]
    spec: JudgeSpec = build_judge(fails_on_x)
    found = judge_rollouts(rows, TASKS, spec, advantage_fn="grpo", shaping=Shaping(drop_zero_variance=True))
    assert [r.dropped_by for r in found.rows] == [ZERO_VARIANCE] * 2 + [JUDGE_ERROR] + [None] * 2 + [JUDGE_ERROR]


def test_states_of_the_environment_reach_the_advantage() -> None:
    rows = [row(1, 0, "2", state="s"), row(1, 1, "x", state="s"), row(1, 2, "x", state="other")]
    found = judged(rows, Shaping(), "gigpo")
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
        Overlong(1.0, longest, cache)
