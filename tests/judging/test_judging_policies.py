"""Rewards and advantages where several policies made the runs: each policy's rows are judged and compared apart."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import RolloutRow
from rft_platform.judging.execution.compose import JudgePart, JudgeSpec, build_judge
from rft_platform.judging.execution.experience_pipeline import Operator, Pipeline
from rft_platform.judging.execution.judge_rollouts import judge_rollouts, judge_runs
from rft_platform.judging.preferences import preference_pairs
from rft_platform.judging.types import JudgeOutput

from .test_judge_rollouts import TASKS, row


def run_of(number: int, *steps: tuple[str, str], reward: float | None = None, **rewards: float) -> list[RolloutRow]:
    """A run of task 1: who said what, step by step, and what the workflow gave."""
    rows = [row(1, number, text, step=step) for step, (_, text) in enumerate(steps)]
    for made, (policy, _) in zip(rows, steps, strict=True):
        made.call.policy = policy
    rows[-1].run_reward, rows[-1].call.metrics = reward, {f"reward/{name}": value for name, value in rewards.items()}
    return rows


def advantages(rewards: list[float]) -> list[float]:
    """GRPO's over the rows of a group: (r - mean) / (std + 1e-6), std with n - 1."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((value - mean) ** 2 for value in rewards) / (len(rewards) - 1))
    return [(value - mean) / (std + 1e-6) for value in rewards]


GAME = [
    *run_of(0, (DEFAULT_POLICY, "a"), ("rival", "b"), reward=1.0, rival=-1.0),
    *run_of(1, (DEFAULT_POLICY, "a"), ("rival", "b"), (DEFAULT_POLICY, "c"), reward=0.25, rival=3.0),
    *run_of(2, (DEFAULT_POLICY, "a"), ("rival", "b"), reward=0.0),
    *run_of(3, (DEFAULT_POLICY, "a"), reward=0.5),  # the rival had no turn
]


def test_rows_of_different_policies_are_never_compared() -> None:
    judged = judge_rollouts(GAME, TASKS, None, advantage_fn="grpo").rows
    assert [one.row_id for one in judged] == [one.row_id for one in GAME]
    first, rival = iter(advantages([1.0, 0.25, 0.25, 0.0, 0.5])), iter(advantages([-1.0, 3.0, 0.0]))
    for one, made in zip(judged, GAME, strict=True):
        assert one.advantage == pytest.approx(next(first if made.policy == DEFAULT_POLICY else rival), abs=1e-9)
    # run 2 names no reward of the rival's own
    assert [one.reward for one in judged] == [1.0, -1.0, 0.25, 3.0, 0.25, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("function", ["step_wise_grpo", "opmd", "rloo"])
def test_each_policy_alone_would_get_the_same(function: str) -> None:
    together = {one.row_id: one for one in judge_rollouts(GAME, TASKS, None, advantage_fn=function).rows}
    for policy in (DEFAULT_POLICY, "rival"):
        alone = []
        for made in (made for made in GAME if made.policy == policy):
            last = [other for other in GAME if other.run_id == made.run_id][-1]
            reward = last.run_reward if policy == DEFAULT_POLICY else last.metrics.get("reward/rival", last.run_reward)
            alone.append(replace(made, call=replace(made.call, policy=DEFAULT_POLICY, metrics={}), run_reward=reward))
        for one in judge_rollouts(alone, TASKS, None, advantage_fn=function).rows:
            assert (one.reward, one.advantage) == (together[one.row_id].reward, together[one.row_id].advantage)


def zero_sum(task: dict[str, Any], response: Any) -> JudgeOutput:
    """What the answer's length is to one it costs the other."""
    return JudgeOutput(float(len(response)), {"letters": len(response)}, rewards={"rival": -float(len(response))})


def same_for_all(task: dict[str, Any], response: Any) -> float:
    """1 for everybody."""
    return 1.0


def test_a_judge_rewards_policies_by_name() -> None:
    (run,) = judge_runs(GAME[:2], TASKS, build_judge(zero_sum))
    assert (run.reward, run.rewards, run.parts) == (1.0, {"rival": -1.0}, {"zero_sum": 1.0, "zero_sum/letters": 1.0})
    parts = (JudgePart("zero_sum", zero_sum, {}, 2.0), JudgePart("same_for_all", same_for_all, {}, 0.5))
    (run,) = judge_runs(GAME[:2], TASKS, JudgeSpec(parts, "v"))
    assert (run.reward, run.rewards) == (2.5, {"rival": -1.5})  # what a part does not name counts as for the first


def test_a_reward_that_is_not_finite_leaves_the_run_out() -> None:
    def broken(task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(1.0, rewards={"rival": math.nan if response == "b" else 0.0})

    runs = judge_runs(GAME[:5], TASKS, build_judge(broken))
    assert [run.error is not None for run in runs] == [True, False]


def test_pairs_are_of_the_first_policy_with_its_rewards() -> None:
    game = [
        *run_of(0, (DEFAULT_POLICY, "good"), ("rival", "bad"), reward=1.0, rival=-1.0),
        *run_of(1, (DEFAULT_POLICY, "weak"), ("rival", "strong"), reward=0.0, rival=3.0),
    ]
    (pair,) = preference_pairs(game, judge_rollouts(game, TASKS, None, advantage_fn="grpo").rows).rows
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("good", "weak")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


def test_operators_work_on_each_policy_apart() -> None:
    pipeline = Pipeline.of([Operator("reward_filter", {"threshold": -0.5})])
    found = judge_rollouts(GAME, TASKS, None, advantage_fn="grpo", pipeline=pipeline)
    dropped = [one.row_id for one in found.rows if one.dropped_by]
    assert dropped == [GAME[1].row_id], "the rival lost run 0; the first policy's row of it stays"
    assert [(report.name, report.rows_in, report.rows_out) for report in found.operators] == [
        ("reward_filter", 5, 5),
        ("reward_filter (rival)", 3, 2),
    ]


def test_metrics_of_a_run_shape_the_rewards_of_all_its_policies() -> None:
    runs = [
        *run_of(0, (DEFAULT_POLICY, "a"), ("rival", "b"), (DEFAULT_POLICY, "c"), reward=1.0),
        *run_of(1, (DEFAULT_POLICY, "a"), ("rival", "b"), reward=1.0),
    ]
    runs[2].call.metrics, runs[4].call.metrics = {"cost": 2.0}, {"cost": 5.0}
    pipeline = Pipeline.of([Operator("reward_shaping", {"add": {"metrics.cost": -0.1}})])
    found = judge_rollouts(runs, TASKS, None, advantage_fn="grpo", pipeline=pipeline)
    assert [one.reward for one in found.rows] == pytest.approx([0.8, 0.8, 0.8, 0.5, 0.5])
