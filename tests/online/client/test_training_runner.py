"""Shadow runs against the real service: selection, groups, rewards, refused tools, and users who notice nothing."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.online import ExplicitMarkingStrategy, SamplingRateStrategy, TrainingRunner, mark, tool
from rft_platform.online.client import openai_clients

ALL = SamplingRateStrategy.of(1.0)


def fixed(text: str) -> Any:
    """A production client that always gives the same answer."""
    message = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=lambda **_: message)))


def agent(model: Any, message: str) -> str:
    messages = [{"role": "user", "content": message}]
    answer = model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return answer.choices[0].message.content or ""


def test_selected_requests_are_repeated_rewarded_and_committed(service) -> None:
    runs = []

    def reward(run: Any) -> float:
        runs.append(run)
        return 0.75

    with TrainingRunner(service.url, "policy", reward, selection_strategy=ALL, repeat_time=3) as runner:
        ask = runner.observe(agent, fixed("84"), "gpt-4")
        assert ask("What is 12*7?") == "84"
    assert runner.counts.rewarded == runner.counts.committed == 3
    assert {run.production_response for run in runs} == {"84"}
    rows = service.store.settle(1)
    assert len({row.task_id for row in rows}) == 1
    assert sorted(row.run_id for row in rows) == ["0", "1", "2"]
    assert {row.reward for row in rows} == {0.75}


async def test_asynchronous_agents(service) -> None:
    async def agent_async(model: Any, message: str) -> str:
        if model.name == "gpt-4":
            return "84"
        messages = [{"role": "user", "content": message}]
        answer = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        return answer.choices[0].message.content or ""

    runner = TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL).start()
    assert await runner.observe(agent_async, None, "gpt-4")("What is 12*7?") == "84"
    await asyncio.to_thread(runner.stop)
    assert runner.counts.committed == 1


def test_only_marked_requests(service) -> None:
    strategy = ExplicitMarkingStrategy()
    with TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=strategy) as runner:
        ask = runner.observe(agent, fixed("84"), "gpt-4")
        ask("first")
        mark("high-quality", "user-feedback")
        ask("second")
        ask("third")
    assert (runner.counts.requests, runner.counts.selected, runner.counts.committed) == (3, 1, 1)


def test_shadow_runs_call_no_writing_tool(service) -> None:
    called: list[str] = []

    @tool(effect="read")
    def search() -> None:
        called.append("search")

    def order() -> None:
        called.append("order")

    def buyer(model: Any, message: str) -> str:
        model.tools["search"]()
        try:
            model.tools["order"]()
        except UserError as error:
            return str(error)
        return agent(model, message)

    with TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL) as runner:
        assert runner.observe(buyer, fixed("done"), "gpt-4", [search, order])("buy") == "done"
    assert sorted(called) == ["order", "search", "search"]
    assert (runner.counts.refused_tools, runner.counts.rewarded) == (1, 0)


def test_shadow_runs_call_no_writing_tool_in_other_threads(service) -> None:
    called: list[str] = []

    def order() -> None:
        called.append("order")

    def buyer(model: Any, message: str) -> str:
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(model.tools["order"]).exception()
        return str(error or "ordered")

    with TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL) as runner:
        assert runner.observe(buyer, fixed("done"), "gpt-4", [order])("buy") == "ordered"
    assert called == ["order"]
    assert (runner.counts.refused_tools, runner.counts.rewarded) == (1, 0)


def test_a_tool_declared_as_writing_refuses_by_its_own_name(service) -> None:
    called: list[str] = []

    @tool(effect="write")
    def order() -> None:
        called.append("order")

    def buyer(model: Any, message: str) -> str:
        order()
        return "ordered"

    with TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL) as runner:
        assert runner.observe(buyer, fixed("done"), "gpt-4")("buy") == "ordered"
    assert (called, runner.counts.refused_tools) == (["order"], 1)


def test_failures_do_not_reach_the_user(service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_clients, "_RETRIES", 0)

    def reward(run: Any) -> float:
        raise ValueError(run.task_id)

    with TrainingRunner(service.url, "policy", reward, selection_strategy=ALL) as runner:
        assert runner.observe(agent, fixed("84"), "gpt-4")("x") == "84"
    assert runner.counts.failed == 1
    with TrainingRunner("http://127.0.0.1:9", "policy", lambda _: 1.0, selection_strategy=ALL) as runner:
        assert runner.observe(agent, fixed("84"), "gpt-4")("x") == "84"
    assert (runner.counts.failed, runner.counts.failed_commits) == (1, 1)


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="repeat_time"):
        TrainingRunner("http://127.0.0.1:9", "policy", lambda _: 1.0, repeat_time=0)


def test_agents_and_tools_that_are_no_plain_functions(service) -> None:
    called: list[str] = []

    class Lookup:
        def __call__(self, word: str) -> None:
            called.append(word)

    def search(place: str, word: str) -> None:
        called.append(f"{place} {word}")

    def buyer(place: str, model: Any, message: str) -> str:
        assert sorted(model.tools) == ["Lookup", "search"]
        if model.name == "gpt-4":
            model.tools["search"]("pen")
            model.tools["Lookup"]("ink")
        return agent(model, f"{message} in {place}")

    with TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL) as runner:
        ask = runner.observe(partial(buyer, "town"), fixed("done"), "gpt-4", [partial(search, "town"), Lookup()])
        assert ask("buy") == "done"
    assert called == ["town pen", "ink"]
    assert runner.counts.rewarded == 1


async def test_an_asynchronous_agent_that_is_an_object(service) -> None:
    class Agent:
        async def __call__(self, model: Any, message: str) -> str:
            return "84"

    runner = TrainingRunner(service.url, "policy", lambda _: 1.0, selection_strategy=ALL)
    assert await runner.observe(Agent(), None, "gpt-4")("What is 12*7?") == "84"


def test_two_tools_of_one_name_are_refused() -> None:
    runner = TrainingRunner("http://127.0.0.1:9", "policy", lambda _: 1.0)
    with pytest.raises(UserError, match="sorted is the name of several"):
        runner.observe(agent, None, "gpt-4", [partial(sorted, reverse=True), sorted])


def test_a_runner_that_was_stopped_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_clients, "_RETRIES", 0)
    runner = TrainingRunner("http://127.0.0.1:9", "policy", lambda _: 1.0)
    with runner, pytest.raises(UserError, match="has started already"):
        runner.start()
    with pytest.raises(UserError, match="was stopped: create another TrainingRunner"):
        runner.start()
