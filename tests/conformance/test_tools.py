"""Tools: announced through the template, calls read out of the text."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft_platform.inference.client import EngineClient

from .conftest import TOOL_QUESTION as QUESTION
from .conftest import TOOLS

IDS = {"extra_body": {"return_token_ids": True}}


def test_tools_are_rendered(engine: EngineClient, client: Any, model_name: str) -> None:
    answer = client.chat.completions.create(model=model_name, messages=QUESTION, tools=TOOLS, max_tokens=1, **IDS)
    assert answer.prompt_token_ids == engine.render([QUESTION], TOOLS)[0]
    assert '"name": "calculator"' in engine.decode([answer.prompt_token_ids])[0]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculator"}}])
def test_a_forced_call_is_made(
    engine: EngineClient, client: Any, model_name: str, memorised: Path, choice: Any
) -> None:
    engine.update_weights(memorised, 3)
    answer = client.chat.completions.create(
        model=model_name, messages=QUESTION, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=80
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "calculator" and json.loads(call.function.arguments).keys() == {"expression"}


def test_a_history_with_tool_calls(engine: EngineClient, client: Any, model_name: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12*7"}'}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "84"},
    ]
    answer = client.chat.completions.create(model=model_name, messages=history, tools=TOOLS, max_tokens=1, **IDS)
    text = engine.decode([answer.prompt_token_ids])[0]
    assert '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>' in text
    assert "<tool_response>\n84\n</tool_response>" in text


@pytest.mark.usefixtures("restored")
def test_hermes_calls_are_parsed_whole_and_streamed(
    engine: EngineClient, client: Any, model_name: str, memorised: Path
) -> None:
    engine.update_weights(memorised, 3)
    request: dict[str, Any] = {"model": model_name, "messages": QUESTION, "tools": TOOLS, "temperature": 0}
    answer = client.chat.completions.create(**request)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "calculator" and json.loads(call.function.arguments) == {"expression": "12*7"}
    assert call.id and call.type == "function"
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
    streamed = [call for piece in pieces for call in piece.delta.tool_calls or []]
    assert {piece.index for piece in streamed} == {0}
    assert "".join(piece.function.name or "" for piece in streamed) == "calculator"
    assert "".join(piece.function.arguments or "" for piece in streamed) == call.function.arguments
    assert "".join(piece.delta.content or "" for piece in pieces) == ""
    assert pieces[-1].finish_reason == "tool_calls"
    untold = client.chat.completions.create(**{**request, "tool_choice": "none"}, max_tokens=40)
    assert not untold.choices[0].message.tool_calls and untold.choices[0].finish_reason != "tool_calls"
