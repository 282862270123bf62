"""Step rewards and states of runs that call the model in several tasks and threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rft_platform.rollout.recording.branches import Branches
from rft_platform.rollout.recording.model_handle import ModelHandle, state_hash
from rft_platform.rollout.workflow import WorkflowOutput

from .fake_engine import FakeEngine
from .samples import roll_out, tasks


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def call_blocking(model: ModelHandle, text: str) -> None:
    messages: Any = asked(text)
    model.get_openai_client().chat.completions.create(model=model.model_name, messages=messages)


def call_gateway(model: ModelHandle, text: str) -> None:
    body = {"model": "m", "messages": asked(text)}
    key = {"authorization": f"Bearer {model.api_key}"}
    httpx.post(f"{model.base_url}/chat/completions", json=body, headers=key, trust_env=False).raise_for_status()


def rewards(engine: FakeEngine, workflow: Any) -> dict[str, float | None]:
    """The step reward of each prompt of a run."""
    rows = roll_out(engine, tasks(1), workflow, repeat_times=1, max_retries=0).rows
    return {row.messages[0]["content"]: row.step_reward for row in rows}


async def branch(model: ModelHandle, number: int, turns: int = 2) -> None:
    """Turns that overlap with those of the other branches."""
    for turn in range(turns):
        await model.chat(asked(f"{number}.{turn}"))
        await asyncio.sleep(0.02)
        model.give_step_reward(float(number))


def test_branches_reward_their_own_calls(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await model.chat(asked("plan"))
        await asyncio.gather(*(branch(model, number) for number in range(1, 5)))
        return WorkflowOutput()

    expected = {f"{number}.{turn}": float(number) for number in range(1, 5) for turn in range(2)}
    assert rewards(engine, workflow) == {"plan": None, **expected}


def test_branches_in_threads_reward_their_own_calls(engine: FakeEngine) -> None:
    together = asyncio.Event()

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        async def threaded(number: int) -> None:
            def work() -> None:
                call_blocking(model, str(number))
                if number == 2:
                    loop.call_soon_threadsafe(together.set)
                else:
                    asyncio.run_coroutine_threadsafe(together.wait(), loop).result(20)
                model.give_step_reward(float(number))

            await asyncio.to_thread(work)

        loop = asyncio.get_running_loop()
        await asyncio.gather(threaded(1), threaded(2))
        return WorkflowOutput()

    assert rewards(engine, workflow) == {"1": 1.0, "2": 2.0}


Calls = Callable[[ModelHandle, str], Any]


async def in_a_task(model: ModelHandle, text: str) -> None:
    await asyncio.create_task(model.chat(asked(text)))


async def with_a_limit(model: ModelHandle, text: str) -> None:
    await asyncio.wait_for(model.chat(asked(text)), 20)


async def in_a_thread(model: ModelHandle, text: str) -> None:
    await asyncio.to_thread(call_blocking, model, text)


async def in_a_pool(model: ModelHandle, text: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, call_blocking, model, text)


async def by_the_gateway(model: ModelHandle, text: str) -> None:
    await asyncio.to_thread(call_gateway, model, text)


@pytest.mark.parametrize("call", [in_a_task, with_a_limit, in_a_thread, in_a_pool, by_the_gateway])
def test_calls_one_after_the_other_are_rewarded_wherever_they_are_made(engine: FakeEngine, call: Calls) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await call(model, "first")
        model.give_step_reward(1.0)
        await model.chat(asked("direct"))
        model.give_step_reward(2.0)
        await call(model, "last")
        model.give_step_reward(3.0)
        return WorkflowOutput()

    assert rewards(engine, workflow) == {"first": 1.0, "direct": 2.0, "last": 3.0}


def test_a_blocking_workflow_rewards_what_its_threads_and_loops_call(engine: FakeEngine) -> None:
    async def agent(model: ModelHandle, text: str) -> None:
        await model.chat(asked(text))

    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        call_blocking(model, "direct")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call_blocking, model, "pool").result()
        model.give_step_reward(1.0)
        asyncio.run(agent(model, "loop"))
        model.give_step_reward(2.0)
        return WorkflowOutput()

    assert rewards(engine, workflow) == {"direct": None, "pool": 1.0, "loop": 2.0}


def test_a_state_holds_for_its_branch_and_for_tasks_that_it_starts(engine: FakeEngine) -> None:
    async def played(model: ModelHandle, number: int) -> None:
        model.set_env_state(number)
        await asyncio.sleep(0.02)
        await model.chat(asked(f"{number}"))
        await in_a_task(model, f"{number}, in a task")

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        model.set_env_state(0)
        await model.chat(asked("0"))
        await asyncio.gather(played(model, 1), played(model, 2))
        await asyncio.create_task(asyncio.to_thread(model.set_env_state, 3))
        await by_the_gateway(model, "3, by the gateway")
        await model.chat(asked("3"))
        return WorkflowOutput(reward=0.0)

    rows = roll_out(engine, tasks(1), workflow, repeat_times=1, max_retries=0).rows
    states = {row.messages[0]["content"]: row.env_state_hash for row in rows}
    assert len(states) == 7
    assert states == {text: state_hash(int(text.partition(",")[0])) for text in states}


def test_another_runs_context_has_no_marks() -> None:
    first, second = Branches(), Branches()
    first.start()
    mark = first.mark()
    assert second.mark() is None and second.latest([(None, "a"), (None, "b")]) == "b"
    assert first.latest([(mark, "a"), (None, "b")]) == "b" and first.latest([]) is None
