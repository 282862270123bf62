"""What an engine serves is what the recorder needs, on every endpoint and streamed too."""

from typing import Any

import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.history import RunHistory
from rft_platform.rollout.recording import RecordingClients

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
        assert close(call_made.logprobs, done.logprobs, 1e-5)
