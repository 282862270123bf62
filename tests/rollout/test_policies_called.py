"""Calls that name a policy: on every road each goes to its policy's engine, and its row says so."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rft_platform.common.errors import UserCodeError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.class_style import ClassWorkflow, Experience, Workflow
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.recording.policy_routes import PolicyRoute
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, WorkflowOutput

from .fake_engine import FakeEngine
from .samples import roll_out, tasks

ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture
def rival() -> Iterator[FakeEngine]:
    """A second engine, which serves another version."""
    fake = FakeEngine()
    fake.policy_version = 3
    fake.serve()
    yield fake
    fake.shutdown()


def explore(engine: Any, rival: Any, workflow: Any, **options: Any) -> RolloutBatch:
    given = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(max_tokens=64), "max_retries": 0}
    return roll_out(engine, tasks(1), workflow, policies={"rival": rival}, **{**given, **options})


async def by_every_road(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """By the handles, by a client and a name, by the blocking client, over the gateway; two calls are for the first."""
    await model.chat(ASKED)
    rival = model.policy("rival")
    await rival.chat(ASKED)
    client: Any = model.get_openai_async_client()
    await client.chat.completions.create(model="gpt-unheard-of", messages=ASKED)
    await client.chat.completions.create(model="rival", messages=ASKED)
    blocking: Any = rival.get_openai_client()
    await asyncio.to_thread(blocking.chat.completions.create, model=rival.model_name, messages=ASKED)
    async with httpx.AsyncClient(base_url=rival.base_url, trust_env=False) as outside:
        headers = {"Authorization": f"Bearer {rival.api_key}"}
        body = {"model": rival.model_name, "messages": ASKED}
        answer = await outside.post("chat/completions", json=body, headers=headers)
        answer.raise_for_status()
    return WorkflowOutput(reward=1.0, rewards={"rival": -1.0})


CALLED = [DEFAULT_POLICY, "rival", DEFAULT_POLICY, "rival", "rival", "rival"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "workers"])
def test_each_call_reaches_the_policy_it_names(engine: FakeEngine, rival: FakeEngine, where: str) -> None:
    workflow: Any = by_every_road if where == "here" else WorkerWorkflow(f"{__name__}:by_every_road", count=1)
    batch = explore(engine, rival, workflow)
    for run in (batch.rows[:6], batch.rows[6:]):
        assert [row.policy for row in run] == CALLED
        assert [row.policy_version for row in run] == [7 if name == DEFAULT_POLICY else 3 for name in CALLED]
        assert run[-1].run_reward == 1.0 and run[-1].metrics == {"reward/rival": -1.0}
    assert (len(engine.chat_requests), len(rival.chat_requests)) == (4, 8)
    assert batch.report.policy_versions == (7,)


def test_step_rewards_are_a_policys_own(engine: FakeEngine, rival: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        other = model.policy("rival")
        for _ in range(2):
            await model.chat(ASKED)
            await other.chat(ASKED)
            model.give_step_reward(1.0)
            other.give_step_reward(-0.5)
        return WorkflowOutput()

    rows = explore(engine, rival, workflow).rows[:4]
    assert [row.step_reward for row in rows] == [1.0, -0.5, 1.0, -0.5]
    assert rows[-1].run_reward == 2.0 and rows[-1].metrics == {"reward/rival": -1.0}


class Rewarded(Workflow):
    """Class style: each policy's last experience has its reward."""

    async def run_async(self) -> list[Experience]:
        """One call of each."""
        await self.model.chat_async(ASKED)
        await self.model.policy("rival").chat_async(ASKED)
        mine, other = self.model.extract_experience_from_history()
        mine.reward, other.reward = 0.25, 0.75
        return [mine, other]


class Clients(Workflow):
    """Class style: two clients, each with the name of its policy."""

    async def run_async(self) -> list[Experience]:
        models = [self.model, self.model.policy("rival")]
        clients = [model.get_openai_async_client() for model in models]
        assert clients == [model.get_openai_async_client() for model in models], "the same until they are closed"
        for client in clients:
            await client.chat.completions.create(model=client.model_path, messages=ASKED)
        await clients[1].close()
        again = self.model.policy("rival").get_openai_async_client()
        await again.chat.completions.create(model=again.model_path, messages=ASKED)
        experiences = self.model.extract_experience_from_history()
        experiences[0].reward = 1.0
        return experiences


def test_a_class_has_a_client_for_each_policy(engine: FakeEngine, rival: FakeEngine) -> None:
    rows = explore(engine, rival, ClassWorkflow(Clients)).rows
    assert [row.policy for row in rows] == [DEFAULT_POLICY, "rival", "rival"] * 2


@pytest.mark.slow
def test_a_class_rewards_each_policys_last_experience(engine: FakeEngine, rival: FakeEngine) -> None:
    last = explore(engine, rival, WorkerWorkflow(f"{__name__}:Rewarded", count=1)).rows[1]
    assert (last.run_reward, last.metrics) == (0.25, {"reward/rival": 0.75})


class Stepwise(Workflow):
    """Class style: the first policy has a step reward, the other one a reward."""

    async def run_async(self) -> list[Experience]:
        await self.model.chat_async(ASKED)
        self.model.give_step_reward(0.5)
        await self.model.policy("rival").chat_async(ASKED)
        experiences = self.model.extract_experience_from_history()
        experiences[-1].reward = -1.0
        return experiences


def test_the_reward_of_another_policy_does_not_replace_step_rewards(engine: FakeEngine, rival: FakeEngine) -> None:
    last = explore(engine, rival, ClassWorkflow(Stepwise)).rows[1]
    assert (last.run_reward, last.metrics) == (0.5, {"reward/rival": -1.0})


@pytest.mark.parametrize("wrong", ["policy", "reward"])
def test_an_unknown_policy_is_refused(engine: FakeEngine, rival: FakeEngine, wrong: str) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await (model.policy("nobody") if wrong == "policy" else model).chat(ASKED)
        return WorkflowOutput(reward=0.0, rewards={"nobody": 1.0})

    with pytest.raises(UserCodeError, match=r"nobody.* are: rival"):
        explore(engine, rival, workflow)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_further_policy_is_none_of_the_firsts_replicas(
    engine: FakeEngine, rival: FakeEngine, blocking: bool
) -> None:
    replicas = Replicas([Replica(0, EngineClient(engine.base_url))], {})
    clients = RecordingClients("http://127.0.0.1:1/v1", 30, replicas)
    road = PolicyRoute("fake-model", rival.base_url)
    history = RunHistory("fake-model", SamplingParams(64), seed=1, policies={"rival": road})
    if blocking:
        with clients.sync_client(history) as sync:
            for name in ("rival", "m"):
                await asyncio.to_thread(sync.chat.completions.create, model=name, messages=ASKED)  # type: ignore[call-overload]
    else:
        async with clients.async_client(history) as client:
            for name in ("rival", "m"):
                await client.chat.completions.create(model=name, messages=ASKED)  # type: ignore[call-overload]
    assert [(call.policy, call.policy_version) for call in history.calls()] == [("rival", 3), (DEFAULT_POLICY, 7)]
