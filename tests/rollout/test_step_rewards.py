"""Rewards that an environment gives step by step, and runs that outgrow the context."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_platform.common.errors import UserCodeError
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.inference.vllm_engine.openai_wire import openai_error
from rft_platform.judging.execution.judge_rollouts import judge_rollouts
from rft_platform.openai_api.errors import TOO_LONG, is_too_long
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, WorkflowOutput
from rft_platform.rollout.workflows.dialogue import DialogueWorkflow
from rft_platform.training.data.rollout_rows import read_rollouts

from .fake_engine import FakeEngine
from .samples import roll_out, tasks

HERE = __name__


def explore(engine: Any, workflow: Workflow, count: int = 1, **options: Any) -> RolloutBatch:
    settings = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, tasks(count), workflow, **settings)


async def walk(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Three steps, rewarded twice, not at all and once; the run's own reward is left to them."""
    for step, rewards in enumerate([(0.5, 0.25), (), (-0.5,)]):
        model.set_env_state({"step": step})
        await model.chat([{"role": "user", "content": f"step {step}"}], n=2 if step == 2 else 1)
        for reward in rewards:
            model.give_step_reward(reward)
    return WorkflowOutput(response="done")


def test_a_run_has_the_sum_of_its_step_rewards(engine: FakeEngine) -> None:
    rows = explore(engine, walk).rows[:4]
    assert [row.step for row in rows] == [0, 1, 2, 2]
    assert [row.step_reward for row in rows] == [0.75, None, -0.5, -0.5]
    assert [row.run_reward for row in rows] == [None, None, None, 0.25]  # a call of two choices counts once


def test_the_reward_of_the_workflow_is_kept(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await walk(task, model)
        return WorkflowOutput(reward=2.0)

    rows = explore(engine, workflow).rows[:4]
    assert rows[-1].run_reward == 2.0 and rows[0].step_reward == 0.75


@pytest.mark.parametrize(("value", "early"), [(float("nan"), False), ("much", False), (1.0, True)])
def test_a_step_reward_must_be_a_number_for_a_call(engine: FakeEngine, value: Any, early: bool) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if not early:
            await model.chat([{"role": "user", "content": "hello"}])
        model.give_step_reward(value)
        return WorkflowOutput()

    expected = "made no model call yet" if early else "expected a finite number"
    with pytest.raises(UserCodeError, match=expected):
        explore(engine, workflow, max_retries=0)


def test_step_rewards_reach_the_advantages_and_the_trainer(engine: FakeEngine, tmp_path: Path) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        for step in range(2):
            model.set_env_state(step)
            answer = await model.chat([{"role": "user", "content": f"{task['question']} {step}"}])
            model.give_step_reward(int(answer["content"][0], 16) / 16)
        return WorkflowOutput(response="done")

    batch = explore(engine, workflow, repeat_times=2)
    judged = judge_rollouts(
        batch.rows, {t.task_id: t for t in tasks(1)}, None, advantage_fn="gigpo", advantage_args={"gamma": 1.0}
    )
    (a0, a1), (b0, b1) = [[row.step_reward or 0.0 for row in batch.rows[i : i + 2]] for i in (0, 2)]
    episode, first, second = (a0 + a1 - b0 - b1) / 2, (a0 + a1 - b0 - b1) / 2, (a1 - b1) / 2
    want = [episode + first, episode + second, -episode - first, -episode - second]
    np.testing.assert_allclose([row.advantage for row in judged.rows], want, atol=1e-12)

    store = ExperienceStore(tmp_path)
    store.write_rollouts(1, 0, batch.rows)
    store.write_judged(1, "workflow", judged.rows)
    rollouts = [str(path) for path in sorted(tmp_path.glob("r0001/rollouts/*.parquet"))]
    judgements = [str(path) for path in sorted(tmp_path.glob("r0001/judged/*.parquet"))]
    rows = read_rollouts(rollouts, judgements, policy_gradient=True)
    np.testing.assert_array_equal(rows.facts["step_reward"], [a0, a1, b0, b1])


async def talks_on(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Never stops by itself."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    while True:
        messages.append(await model.chat(messages, max_tokens=4))
        messages.append({"role": "user", "content": "+1" * (10 if len(messages) < 4 else 2100)})


async def wraps_its_errors(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """As frameworks do that tell nothing of what went wrong below them."""
    try:
        return await talks_on(task, model)
    except Exception:
        raise RuntimeError("the agent has stopped") from None


async def compresses(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Gets over it: the conversation is too long once, and begins anew."""
    try:
        await talks_on(task, model)
    except Exception:
        answer = await model.chat([{"role": "user", "content": "in short?"}], max_tokens=8)
    if task.get("fails"):
        raise KeyError("of another cause")
    return WorkflowOutput(reward=1.0, response=answer["content"])


@pytest.mark.parametrize("workflow", [talks_on, wraps_its_errors])
def test_a_run_that_outgrows_the_context_is_cut_off(policy_engine: PolicyEngine, workflow: Workflow) -> None:
    batch = explore(policy_engine, workflow, repeat_times=1, truncated_reward=-1.0, max_retries=0)
    report, last = batch.report, batch.rows[-1]
    assert (report.failed, report.context_truncated, report.errors) == (0, 1, {})
    assert [row.step for row in batch.rows] == [0, 1]
    assert last.truncated and last.metrics == {"truncated_by_context": 1.0}
    assert last.run_reward == -1.0 and last.run_output is None
    assert len(last.prompt_ids) < policy_engine.status().max_model_len
    with pytest.raises(UserCodeError):  # where it is to count as a failure
        explore(policy_engine, workflow, repeat_times=1, truncated_reward=None, max_retries=0)


@pytest.mark.slow
def test_a_worker_cuts_a_run_off_too(policy_engine: PolicyEngine) -> None:
    here = explore(policy_engine, talks_on, repeat_times=1)
    there = explore(policy_engine, WorkerWorkflow(f"{HERE}:talks_on", count=1), repeat_times=1)
    assert [(r.response_ids, r.truncated, r.metrics) for r in there.rows] == [
        (r.response_ids, r.truncated, r.metrics) for r in here.rows
    ]


def test_a_workflow_may_get_over_it(policy_engine: PolicyEngine) -> None:
    last = explore(policy_engine, compresses, repeat_times=1).rows[-1]
    assert last.run_reward == 1.0 and "truncated_by_context" not in last.metrics
    assert last.messages[0]["content"] == "in short?"


class Refusal(Exception):
    """What an OpenAI client raises where a prompt is too long; of whose prompt it is, it does not say."""

    status_code, code = 400, "context_length_exceeded"


async def asks_a_judge(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """The policy answers; what outgrows its context is another model."""
    await model.chat([{"role": "user", "content": task["question"]}])
    raise Refusal("This model's maximum context length is 9 tokens")


def talkative(messages: list[dict[str, Any]]) -> str:
    """A dialogue's user whose own model has had enough."""
    raise Refusal("This model's maximum context length is 9 tokens")


@pytest.mark.parametrize("workflow", [asks_a_judge, DialogueWorkflow(f"{HERE}:talkative")])
def test_the_context_of_another_model_is_not_the_policys(engine: FakeEngine, workflow: Workflow) -> None:
    with pytest.raises(UserCodeError, match="Refusal: This model's maximum context length"):
        explore(engine, workflow, repeat_times=1, max_retries=0)


def test_a_workflow_that_survived_a_long_prompt_may_fail_later(policy_engine: PolicyEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return await compresses({**task, "fails": True}, model)

    with pytest.raises(UserCodeError, match="of another cause"):
        explore(policy_engine, workflow, repeat_times=1, max_retries=0)


@pytest.mark.parametrize(
    "message",
    [
        # vLLM, by version
        "This model's maximum context length is 4096 tokens. However, you requested 4200 tokens in the messages",
        "The decoder prompt (length 5003) is longer than the maximum model length of 4096.",
        "'max_tokens' or 'max_completion_tokens' is too large: 99. This model's maximum context length is 64 tokens",
        # this platform's engines
        "the prompt has 600 tokens; between 1 and 511 fit the model's context of 512 tokens",
        # other servers
        "the request exceeds the available context size",
    ],
)
def test_engines_word_it_differently(message: str) -> None:
    assert is_too_long(400, message) and not is_too_long(500, message)
    assert openai_error(400, json.dumps({"error": {"message": message}}).encode())["error"]["code"] == TOO_LONG
    assert not is_too_long(400, "temperature must be positive")
