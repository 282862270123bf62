"""Recording clients: what is recorded is what the engine sampled, and the caller does not notice."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from rft_platform.common.errors import EngineError
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory

from .fake_engine import END, FakeEngine, answer_to, encode, logprobs_of, render

MESSAGES: Any = [{"role": "user", "content": "2+2?"}]
PROMPT = render(MESSAGES)


Clients = Callable[..., Any]


@pytest.fixture
async def clients(engine: FakeEngine) -> AsyncIterator[Clients]:
    """``clients(history)`` is a recording client of the fake engine; with ``blocking=True`` a blocking one."""
    make, opened = RecordingClients(engine.base_url, timeout_s=30), AsyncExitStack()

    def client(history: RunHistory, blocking: bool = False) -> Any:
        made: Any = make.sync_client(history) if blocking else make.async_client(history)
        if blocking:
            opened.callback(made.close)
        else:
            opened.push_async_callback(made.close)
        return made

    async with opened:
        yield client


def new_history(**sampling: Any) -> RunHistory:
    return RunHistory("fake-model", SamplingParams(**{"max_tokens": 64, "temperature": 0.7, **sampling}), seed=1)


def assert_as_sampled(call: ModelCall, seed: int, choice: int = 0) -> None:
    text = answer_to(PROMPT, seed, choice)
    assert call.response_ids == [*encode(text), END]
    assert call.rollout_logprobs == pytest.approx(logprobs_of(call.response_ids))
    assert call.prompt_ids == encode(PROMPT)
    assert call.response["content"] == text
    assert (call.choice, call.messages, call.policy_version) == (choice, MESSAGES, 7)


async def test_an_async_call_is_recorded_as_sampled_and_answered_in_the_requested_form(
    engine: FakeEngine, clients: Clients
) -> None:
    history = new_history()
    client = clients(history)
    assert isinstance(client, openai.AsyncOpenAI)
    answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    (call,) = history.calls()
    assert_as_sampled(call, history.call_seed(0))
    assert call.msg_id == answer.id
    assert (call.temperature, call.top_p, call.top_k, call.finish_reason) == (0.7, 1.0, -1, "stop")
    assert answer.choices[0].message.content == call.response["content"]
    assert answer.choices[0].logprobs is None
    assert "token_ids" not in answer.choices[0].model_dump() and "prompt_token_ids" not in answer.model_dump()


async def test_version_0_of_the_weights_is_recorded(engine: FakeEngine, clients: Clients) -> None:
    engine.policy_version = 0
    history = new_history()
    await clients(history).chat.completions.create(model="m", messages=MESSAGES)
    assert [call.policy_version for call in history.calls()] == [0]


async def test_a_call_has_the_state_of_the_environment_when_it_was_sent(engine: FakeEngine, clients: Clients) -> None:
    history, engine.hold = new_history(), threading.Event()
    history.set_env_state("before")
    sent = asyncio.ensure_future(clients(history).chat.completions.create(model="m", messages=MESSAGES))
    await asyncio.to_thread(engine.wait_for, 1)
    history.set_env_state("after")
    engine.hold.set()
    await sent
    assert [call.env_state_hash for call in history.calls()] == ["before"]


async def test_sync_client_records_the_same(engine: FakeEngine, clients: Clients) -> None:
    history = new_history()
    client = clients(history, blocking=True)
    assert isinstance(client, openai.OpenAI)
    answer = await asyncio.to_thread(client.chat.completions.create, model="m", messages=MESSAGES)
    (call,) = history.calls()
    assert_as_sampled(call, history.call_seed(0))
    assert call.msg_id == answer.id and answer.choices[0].logprobs is None


async def test_values_of_the_caller_are_used(engine: FakeEngine, clients: Clients) -> None:
    history = new_history(top_k=5)
    answer = await clients(history).chat.completions.create(
        model="m", messages=MESSAGES, temperature=0.2, seed=11, max_completion_tokens=4, n=3, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    calls = history.calls()
    assert [call.choice for call in calls] == [0, 1, 2]
    assert {call.temperature for call in calls} == {0.2} and {call.top_k for call in calls} == {5}
    for call, choice in zip(calls, answer.choices, strict=True):
        assert call.response_ids == encode(answer_to(PROMPT, 11, call.choice))[:4]
        assert call.finish_reason == "length"
        assert choice.logprobs is not None and choice.logprobs.content is not None and len(choice.logprobs.content) == 4
        assert choice.model_dump()["token_ids"] == call.response_ids
    (body,) = engine.chat_requests
    assert "max_tokens" not in body and body["seed"] == 11
    assert body["model"] == "fake-model"  # there is one model to reach, whatever the agent calls it


@pytest.mark.parametrize("blocking", [False, True])
async def test_streamed_answer_is_recorded_whole(engine: FakeEngine, clients: Clients, blocking: bool) -> None:
    history = new_history()
    chunks: list[Any] = []
    if blocking:
        sync_client = clients(history, blocking=True)

        def consume() -> None:
            chunks.extend(sync_client.chat.completions.create(model="m", messages=MESSAGES, n=2, stream=True))

        await asyncio.to_thread(consume)
    else:
        stream = await clients(history).chat.completions.create(model="m", messages=MESSAGES, n=2, stream=True)
        chunks.extend([chunk async for chunk in stream])
    calls = history.calls()
    assert [call.choice for call in calls] == [0, 1]
    for call in calls:
        assert_as_sampled(call, history.call_seed(0), call.choice)
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == call.choice]
        assert "".join(piece.delta.content or "" for piece in pieces) == call.response["content"]
        assert all(piece.logprobs is None and "token_ids" not in piece.model_dump() for piece in pieces)


async def test_streamed_tool_call_is_put_together(engine: FakeEngine, clients: Clients) -> None:
    history = new_history()
    tools: Any = [{"type": "function", "function": {"name": "calculator", "parameters": {}, "strict": True}}]
    async with clients(history).chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "call: 1+1"}], tools=tools
    ) as stream:
        final = await stream.get_final_completion()
    (call,) = history.calls()
    assert call.tools == tools
    assert call.response["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "1+1"}'}
    assert final.choices[0].message.tool_calls is not None


async def test_stream_left_early_is_not_recorded(engine: FakeEngine, clients: Clients) -> None:
    history = new_history()
    stream = await clients(history).chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await anext(aiter(stream))
    assert history.unfinished_calls == 1
    await stream.close()
    assert history.calls() == [] and history.unfinished_calls == 1
    await clients(history).chat.completions.create(model="m", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        await clients(history).responses.create(model="m", input="x", previous_response_id="r")
    assert history.unfinished_calls == 1  # neither what was answered nor what was refused


async def test_client_retries_are_recorded_once(engine: FakeEngine, clients: Clients) -> None:
    engine.refuse_next = 2
    history = new_history()
    answer = await clients(history).chat.completions.create(model="m", messages=MESSAGES)
    (call,) = history.calls()
    assert call.msg_id == answer.id
    assert history.client_retries == 2


async def test_equal_calls_at_once_keep_their_own_answers(engine: FakeEngine, clients: Clients) -> None:
    """One is refused and sent again while the other is still under way."""
    engine.refuse_next, engine.hold = 1, threading.Event()
    history = new_history()
    client = clients(history)
    asked = [asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES)) for _ in range(2)]
    await asyncio.to_thread(engine.wait_for, 2)
    engine.hold.set()
    answers = await asyncio.gather(*asked)
    assert {call.msg_id for call in history.calls()} == {answer.id for answer in answers}
    assert sorted(body["seed"] for body in engine.chat_requests) == sorted(map(history.call_seed, range(2)))


async def test_answers_under_a_grammar_are_marked(engine: FakeEngine, clients: Clients) -> None:
    history, engine.constrained = new_history(), True
    await clients(history).chat.completions.create(model="m", messages=MESSAGES)
    async with await clients(history).chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
        async for _ in stream:
            pass
    engine.constrained = False
    await clients(history).chat.completions.create(model="m", messages=MESSAGES)
    assert [call.constrained for call in history.calls()] == [True, True, False]


async def test_raw_responses_and_copies_are_recorded(engine: FakeEngine, clients: Clients) -> None:
    history = new_history()
    client = clients(history)
    raw = await client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
    parsed = raw.parse()
    await client.with_options(max_retries=0).chat.completions.create(model="m", messages=MESSAGES)
    assert len(history.calls()) == 2
    assert "token_ids" not in parsed.choices[0].model_dump() and b"token_ids" not in raw.content


@pytest.mark.slow
async def test_histories_do_not_mix(engine: FakeEngine, clients: Clients) -> None:
    histories = [new_history() for _ in range(200)]

    async def talk(number: int) -> None:
        client = clients(histories[number])
        for turn in range(2):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}.{turn}"}])

    await asyncio.gather(*map(talk, range(200)))
    for number, history in enumerate(histories):
        assert [call.messages[0]["content"] for call in history.calls()] == [f"{number}.0", f"{number}.1"]


async def test_a_finished_run_gets_no_more_answers(engine: FakeEngine, clients: Clients) -> None:
    history = new_history()
    client = clients(history).with_options(max_retries=0)
    history.close()
    with pytest.raises((EngineError, openai.APIConnectionError)):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert engine.chat_requests == []


async def test_answer_without_ids_is_an_error(
    engine: FakeEngine, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine._chat_answer
    monkeypatch.setattr(engine, "_chat_answer", lambda body: plain({**body, "return_token_ids": False}))
    client = clients(new_history()).with_options(max_retries=0)
    with pytest.raises((EngineError, openai.APIConnectionError)) as caught:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert "return_token_ids" in str(caught.value.__cause__ or caught.value)
