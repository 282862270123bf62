"""Chat, completions and responses on every road: recorded is what the engine sampled, answered is what was asked."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory

from .fake_engine import FakeEngine

MESSAGES: Any = [{"role": "user", "content": "12+34?"}]
TOOLS: Any = [
    {"type": "function", "name": "calculator", "description": "adds", "parameters": {"type": "object"}, "strict": True}
]


@pytest.fixture(scope="module")
def clients(policy_engine: PolicyEngine) -> Iterator[RecordingClients]:
    """The roads to the real engine."""
    made = RecordingClients(policy_engine.base_url, timeout_s=60, api_key=policy_engine.api_key)
    yield made
    made.close()


def new_history(engine: PolicyEngine, **sampling: Any) -> RunHistory:
    given = {"max_tokens": 10, "temperature": 0.8, **sampling}
    return RunHistory(engine.status().model_path, SamplingParams(**given), 3)


def ask(client: Any, endpoint: str, stream: bool) -> tuple[list[str], Any]:
    """The texts of the answer's choices, and the answer or its last piece."""
    if endpoint == "responses":
        answer = client.responses.create(model="gpt", input=MESSAGES, stream=stream)
        if stream:
            events = list(answer)
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            answer = events[-1].response
            assert answer.output_text == deltas
        return [answer.output_text], answer
    if endpoint == "chat":
        answer = client.chat.completions.create(model="gpt", messages=MESSAGES, n=2, stream=stream)
    else:
        answer = client.completions.create(model="gpt", prompt=["12+34=", "7*8="], n=2, stream=stream)
    texts: dict[int, str] = {}
    for piece in answer if stream else [answer]:
        answer = piece
        for choice in piece.choices:
            message = (choice.delta if stream else choice.message).content if endpoint == "chat" else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (message or "")
    return [texts[index] for index in sorted(texts)], answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
@pytest.mark.parametrize("road", ["client", "gateway"])
def test_recorded_ids_are_the_engines_own(
    policy_engine: PolicyEngine, clients: RecordingClients, road: str, endpoint: str, stream: bool
) -> None:
    history = new_history(policy_engine)
    if road == "client":
        client = clients.sync_client(history)
    else:
        client = openai.OpenAI(base_url=clients.gateway.base_url, api_key=clients.gateway.register(history))
    with client:
        texts, answer = ask(client, endpoint, stream)
    clients.end(history)
    calls = history.calls()
    prompts = policy_engine.render([MESSAGES])
    if endpoint == "completions":
        prompts = [calls[0].prompt_ids, calls[-1].prompt_ids]
        assert policy_engine.decode(prompts) == ["12+34=", "7*8="]
        assert [call.messages[0]["content"] for call in calls] == ["12+34=", "12+34=", "7*8=", "7*8="]
    n = 1 if endpoint == "responses" else 2
    sampling = SamplingParams(10, n=n, temperature=0.8, seed=history.call_seed(0))
    own = [(g.prompt_ids, c) for g in policy_engine.generate(prompts, sampling) for c in g.completions]
    assert [(call.prompt_ids, call.response_ids) for call in calls] == [(ids, c.token_ids) for ids, c in own]
    for call, (_, completion) in zip(calls, own, strict=True):
        np.testing.assert_allclose(call.rollout_logprobs, completion.logprobs, atol=1e-5)
        assert call.finish_reason == completion.finish_reason
    assert [call.response["content"] or "" for call in calls] == texts
    assert {call.msg_id for call in calls} == {answer.id}
    shown = answer.model_dump_json()
    assert "token_ids" not in shown and '"logprob":' not in shown


def test_prompts_of_ids_are_passed_as_they_are(policy_engine: PolicyEngine, clients: RecordingClients) -> None:
    ids = policy_engine.render([MESSAGES])[0]
    history = new_history(policy_engine)
    with clients.sync_client(history) as client:
        answer = client.completions.create(
            model="m", prompt=ids, max_tokens=3, logprobs=0, extra_body={"return_token_ids": True}
        )
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="m", prompt=[])
    (call,) = history.calls()
    assert call.prompt_ids == ids and call.messages == []
    choice: Any = answer.choices[0]
    assert choice.token_ids == call.response_ids
    assert choice.logprobs.token_logprobs == call.rollout_logprobs


def test_a_tool_turn_of_responses_is_the_same_prompt_as_of_chat(
    policy_engine: PolicyEngine, clients: RecordingClients
) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "calculator", "arguments": '{"expression": "1+1"}'}
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    history = new_history(policy_engine)
    with clients.sync_client(history) as client:
        answer = client.responses.create(
            model="m", input=turns, instructions="Be short.", tools=TOOLS, max_output_tokens=4,
            include=["message.output_text.logprobs"], metadata={"a": "b"},
        )  # fmt: skip
        tools: Any = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
        tool_call = {"id": "c1", "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        chat: Any = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "I add.", "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
        client.chat.completions.create(model="m", messages=chat, tools=tools, max_tokens=4)
    first, second = history.calls()
    assert first.messages == chat == second.messages and first.tools == tools == second.tools
    assert first.prompt_ids == second.prompt_ids == policy_engine.render([chat], tools)[0]
    cut = first.finish_reason == "length"
    assert (answer.status, answer.metadata) == ("incomplete" if cut else "completed", {"a": "b"})
    assert answer.usage is not None and answer.usage.input_tokens == len(first.prompt_ids)
    part: Any = answer.output[0]
    assert [token.logprob for token in part.content[0].logprobs] == first.rollout_logprobs


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "no response is stored"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input_image"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format .* engine.kind: vllm"),
    ],
)
async def test_what_cannot_be_translated_is_refused(
    policy_engine: PolicyEngine, clients: RecordingClients, fields: dict[str, Any], words: str
) -> None:
    history = new_history(policy_engine)
    async with clients.async_client(history) as client:
        with pytest.raises(openai.BadRequestError, match=words):
            await client.responses.create(**{"model": "m", "input": "hi", **fields})
    assert history.calls() == []


def test_a_prompt_beyond_the_context_is_noted(policy_engine: PolicyEngine, clients: RecordingClients) -> None:
    for endpoint in ("chat", "responses"):
        history = new_history(policy_engine)
        with clients.sync_client(history) as client, pytest.raises(openai.BadRequestError, match="context"):
            long = "1 " * policy_engine.status().max_model_len
            if endpoint == "chat":
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": long}])
            else:
                client.responses.create(model="m", input=long)
        assert history.context_exceeded


@pytest.mark.parametrize("stream", [False, True])
async def test_a_called_function_is_an_item(engine: FakeEngine, stream: bool) -> None:
    history = RunHistory("fake-model", SamplingParams(64, temperature=0.7), 1)
    async with RecordingClients(engine.base_url, 30).async_client(history) as client:
        answer: Any = await client.responses.create(model="m", input="call: 1+1", tools=TOOLS, stream=stream)
        if stream:
            events = [event async for event in answer]
            kinds = [event.type for event in events]
            assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
            assert kinds[-3:] == [
                "response.function_call_arguments.done", "response.output_item.done", "response.completed",
            ]  # fmt: skip
            answer = events[-1].response
    (item,) = answer.output
    assert (item.type, item.name, item.call_id) == ("function_call", "calculator", "c1")
    assert item.arguments == '{"expression": "1+1"}'
    (call,) = history.calls()
    assert call.response["tool_calls"][0]["function"]["arguments"] == item.arguments


async def test_a_retry_keeps_the_place_and_the_seed(engine: FakeEngine) -> None:
    engine.refuse_next = 2
    history = RunHistory("fake-model", SamplingParams(64, temperature=0.7), 1)
    async with RecordingClients(engine.base_url, 30).async_client(history) as client:
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=MESSAGES) for _ in range(3)))
    assert [call.order for call in history.calls()] == [0, 1, 2] and history.client_retries == 2
    assert sorted(body["seed"] for body in engine.chat_requests) == sorted(history.call_seed(n) for n in range(3))
