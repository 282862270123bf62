"""Workflows that are not asynchronous and run an asynchronous agent by ``asyncio.run``."""

import asyncio
import time
from typing import Any

import pytest

from rft_platform.config.rollout_limits import Patience
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput

from .fake_engine import FakeEngine
from .samples import roll_out, tasks


async def agent(task: dict[str, Any], model: ModelHandle) -> str:
    """An asynchronous agent with one call."""
    messages: Any = [{"role": "user", "content": task["question"]}]
    client = model.get_openai_async_client()
    answer = await client.chat.completions.create(model=model.model_name, messages=messages)
    return answer.choices[0].message.content or ""


def test_an_agent_may_run_in_several_event_loops(engine: FakeEngine) -> None:
    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0, response=[asyncio.run(agent(task, model)) for _ in range(3)])

    batch = roll_out(engine, tasks(2), workflow, max_retries=0)
    assert [row.step for row in batch.rows] == [0, 1, 2] * 4
    assert not any("unfinished" in name for row in batch.rows for name in row.metrics)
    assert (batch.report.failed, batch.report.errors) == (0, {})


def test_the_error_of_the_user_is_reported(engine: FakeEngine) -> None:
    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        asyncio.run(agent(task, model))
        if task["question"] == "question 0":
            raise LookupError("no such page")
        return WorkflowOutput(reward=1.0)

    batch = roll_out(engine, tasks(2), workflow, repeat_times=1, max_retries=0, group_policy="partial")
    assert batch.report.errors == {"LookupError: no such page": 1}


def test_a_run_that_is_stopped_is_not_repeated(engine: FakeEngine) -> None:
    attempts = []

    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        attempts.append(task["question"])
        asyncio.run(agent(task, model))
        if task["question"] == "question 1":
            time.sleep(3)
        return WorkflowOutput(reward=1.0)

    patience = Patience(over_ratio=0.5, wait_after_min_s=0.2)
    report = roll_out(engine, tasks(2), workflow, repeat_times=1, patience=patience, group_policy="partial").report
    assert (report.stopped, report.failed, report.retried, report.errors) == (1, 0, 0, {})
    assert sorted(attempts) == ["question 0", "question 1"]


def test_connections_that_cannot_be_closed_do_not_fail_a_run(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: ModelHandle) -> None:
        raise RuntimeError("cannot close")

    monkeypatch.setattr(ModelHandle, "aclose", fails)

    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0, response=asyncio.run(agent(task, model)))

    assert roll_out(engine, tasks(1), workflow, max_retries=0).report.failed == 0
