"""What an engine serves is what the recorder needs, on every endpoint and streamed too."""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory

from .conftest import TOOLS, close, same

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 12*7?"}]
TURN: list[dict[str, Any]] = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12*7"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "84"},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_recorded_is_what_was_sampled(engine: EngineClient, endpoint: str, stream: bool) -> None:
    sampling = SamplingParams(8, temperature=0.8)
    history = RunHistory(engine.status().model_path, sampling, seed=5)
    with RecordingClients(engine.base_url, timeout_s=60, api_key=engine.api_key).sync_client(history) as client:
        ask: Any
        given: dict[str, Any]
        if endpoint == "chat":
            ask, given = client.chat.completions.create, {"messages": TURN, "tools": TOOLS}
        elif endpoint == "completions":
            ask, given = client.completions.create, {"prompt": engine.render([QUESTION])[0]}
        else:
            call = {"type": "function_call", "call_id": "c1", **TURN[1]["tool_calls"][0]["function"]}
            output = {"type": "function_call_output", "call_id": "c1", "output": "84"}
            tools = [{"type": "function", **TOOLS[0]["function"]}]
            ask, given = client.responses.create, {"input": [*QUESTION, call, output], "tools": tools}
        answer = ask(model="any", stream=stream, **given)
        if stream:
            list(answer)
    (call_made,) = history.calls()
    prompts = engine.render([QUESTION]) if endpoint == "completions" else engine.render([TURN], TOOLS)
    assert call_made.prompt_ids == prompts[0] and call_made.policy_version == engine.status().policy_version
    (own,) = engine.generate(prompts, SamplingParams(8, temperature=0.8, seed=history.call_seed(0)))
    (done,) = own.completions
    assert same([call_made.response_ids], [done.token_ids])
    if call_made.response_ids == done.token_ids:
        assert close(call_made.rollout_logprobs, done.logprobs, 1e-5)


class Sum(BaseModel):
    """What the model must answer."""

    carry: bool
    digit: Literal["1", "2", "3"]


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_an_answer_in_json_is_recorded_as_constrained(engine: EngineClient, endpoint: str) -> None:
    """With the client's own ``parse``; an engine without grammars refuses it and names the one that has them."""
    most = SamplingParams(200)  # a model with random weights writes much white space into its JSON
    history = RunHistory(engine.status().model_path, most, seed=5)
    with RecordingClients(engine.base_url, timeout_s=120, api_key=engine.api_key).sync_client(history) as client:
        ask: Any = client.chat.completions.parse if endpoint == "chat" else client.responses.parse
        given = {"messages": QUESTION, "response_format": Sum}
        if endpoint == "responses":
            given = {"input": QUESTION, "text_format": Sum}
        if not engine.status().engine.startswith("vllm"):
            with pytest.raises(openai.BadRequestError, match=r"response_format .* engine.kind: vllm"):
                ask(model="any", **given)
            return
        answer = ask(model="any", **given)
        parsed = answer.choices[0].message.parsed if endpoint == "chat" else answer.output_parsed
        assert isinstance(parsed, Sum)
        client.chat.completions.create(model="any", messages=QUESTION)
    assert [call.constrained for call in history.calls()] == [True, False]
