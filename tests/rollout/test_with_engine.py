"""The runner on the real engine: both paths record what the engine computes."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_platform.experience.record import RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.runner.run_rollouts import SingleTurn, run_rollouts
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow
from rft_platform.rollout.workflows.calculator import CalculatorWorkflow

from .samples import ask_blocking, ask_once, tasks


def assert_engine_agrees(engine: PolicyEngine, rows: list[RolloutRow]) -> None:
    """Scoring the recorded ids gives the recorded log-probs, so prompt and answer are the tokens that were sampled."""
    scores = engine.score([[*row.prompt_ids, *row.response_ids] for row in rows])
    for row, score in zip(rows, scores, strict=True):
        np.testing.assert_allclose(row.rollout_logprobs, score[len(row.prompt_ids) :], atol=1e-4)
        assert engine.render([row.messages], row.tools or None) == [row.prompt_ids]


@pytest.mark.slow
@pytest.mark.parametrize("workflow", [SingleTurn(), ask_once, ask_blocking, CalculatorWorkflow("use the tool")])
def test_rows_are_what_the_engine_sampled(policy_engine: PolicyEngine, workflow: Workflow, tmp_path: Path) -> None:
    def explore() -> list[RolloutRow]:
        batch = run_rollouts(
            policy_engine, tasks(4), workflow, round=1, batch=0, repeat_times=2, sampling=SamplingParams(max_tokens=8)
        )
        assert batch.report.failed == 0 and batch.report.runs == 8
        return batch.rows

    rows = explore()
    assert_engine_agrees(policy_engine, rows)
    again = explore()
    assert [(row.row_id, row.response_ids) for row in again] == [(row.row_id, row.response_ids) for row in rows]
    store = ExperienceStore(tmp_path)
    store.write_rollouts(1, 0, rows)
    assert [row.response_ids for row in store.rollout_rows(1)] == [row.response_ids for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "workflow",
    [SingleTurn(), ask_once, ask_blocking, WorkerWorkflow(f"{ask_once.__module__}:ask_once", count=1)],
    ids=["single turn", "async", "blocking", "worker"],
)
def test_the_first_run_of_each_task_is_greedy_on_request(policy_engine: PolicyEngine, workflow: Workflow) -> None:
    def explore(temperature: float, **options: Any) -> list[RolloutRow]:
        sampling = SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9 if temperature else 1.0)
        return run_rollouts(
            policy_engine, tasks(3), workflow, round=1, batch=0, repeat_times=3, sampling=sampling, **options
        ).rows

    rows, best = explore(1.3, greedy_first=True), explore(0.0)
    assert [row.run_id for row in rows] == [row.run_id for row in best]
    for position, (row, greedy) in enumerate(zip(rows, best, strict=True)):
        first = position % 3 == 0
        assert (row.temperature, row.top_p) == ((0.0, 1.0) if first else (1.3, 0.9))
        assert (row.response_ids == greedy.response_ids) or not first
    assert any(row.response_ids != greedy.response_ids for row, greedy in zip(rows, best, strict=True))
    assert {row.temperature for row in explore(1.3)} == {1.3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
async def test_recording_equals_the_engines_own_ids(policy_engine: PolicyEngine, blocking: bool, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "12+34?"}]
    history = RunHistory(policy_engine.status().model_path, SamplingParams(max_tokens=12, temperature=0.8), seed=3)
    texts: dict[int, str] = {}

    def hear(answer: Any) -> None:
        for choice in answer.choices:
            text = (choice.delta if stream else choice.message).content or ""
            texts[choice.index] = texts.get(choice.index, "") + text

    arguments: Any = {"model": "gpt", "messages": messages, "n": 3, "stream": stream}
    answer: Any
    clients = RecordingClients(policy_engine.base_url, timeout_s=60, api_key=policy_engine.api_key)
    if blocking:
        with clients.sync_client(history) as client:
            create: Any = client.chat.completions.create
            answer = await asyncio.to_thread(create, **arguments)
            for part in answer if stream else [answer]:
                hear(part)
    else:
        async with clients.async_client(history) as async_client:
            answer = await async_client.chat.completions.create(**arguments)
            for part in [part async for part in answer] if stream else [answer]:
                hear(part)

    seed = history.call_seed(0)
    sampling = SamplingParams(max_tokens=12, temperature=0.8, n=3, seed=seed)
    (own,) = policy_engine.generate(policy_engine.render([messages]), sampling)
    calls = history.calls()
    assert [call.response_ids for call in calls] == [completion.token_ids for completion in own.completions]
    for call, completion in zip(calls, own.completions, strict=True):
        np.testing.assert_allclose(call.rollout_logprobs, completion.logprobs, atol=1e-5)
        assert call.prompt_ids == own.prompt_ids and call.finish_reason == completion.finish_reason
        assert call.response["content"] == texts[call.choice]
