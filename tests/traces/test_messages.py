"""Messages in the forms of other libraries become messages of OpenAI's API."""

import json
from typing import Any

import pytest

from rft_platform.traces.readers.messages import messages_of, tools_of
from rft_platform.traces.readers.trace import BadTraceError, TracedCall, main_conversation

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
EXPECTED = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 2."},
]
FORMS: dict[str, Any] = {
    "OpenAI's chat completions": EXPECTED,
    "JSON text": json.dumps({"model": "tiny", "messages": EXPECTED}),
    "OpenAI's responses": {
        "instructions": "Add.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 2."}]},
        ],
    },
    "Anthropic's messages": {
        "system": [{"type": "text", "text": "Add."}],
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "easy"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]},
        ],
    },
    "LangChain's messages": {"messages": [[
        {"type": "system", "content": "Add."},
        {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"],
         "kwargs": {"content": "1+1?", "type": "human"}},
        {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"],
         "kwargs": {"content": "", "tool_calls": [{"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}]}},
        {"type": "tool", "data": {"content": "2", "tool_call_id": "c1"}},
        {"type": "ai", "content": "It is 2."},
    ]]},
    "LangChain's messages of ChatAnthropic": {"messages": [[
        *EXPECTED[:2],
        {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"],
         "kwargs": {"content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}],
                    "tool_calls": [{"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}]}},
        *EXPECTED[3:],
    ]]},
    "parts of the GenAI conventions": [
        {"role": "system", "parts": [{"type": "text", "content": "Add."}]},
        {"role": "user", "parts": [{"type": "text", "content": "1+1?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "It is 2."}], "finish_reason": "stop"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation(form: str) -> None:
    assert messages_of(FORMS[form]) == EXPECTED


@pytest.mark.parametrize(
    "output",
    [
        "It is 2.",
        {"output": "It is 2."},
        {"choices": [{"message": EXPECTED[-1]}]},
        {"generations": [[{"text": "It is 2.", "message": {"type": "ai", "content": "It is 2."}}]]},
        {"object": "response", "output": [{"type": "message", "role": "assistant",
                                           "content": [{"type": "output_text", "text": "It is 2."}]}]},
        {"role": "assistant", "type": "message", "content": [{"type": "text", "text": "It is 2."}]},
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "It is 2."}]}}]},
    ],
)  # fmt: skip
def test_an_answer(output: Any) -> None:
    assert messages_of(output, "assistant") == [EXPECTED[-1]]


@pytest.mark.parametrize("answer", ['{"answer": "5"}', '{"city": "Paris"}', "[1, 2]", '[{"name": "x"}]', "{half", "[]"])
def test_an_answer_in_json_is_a_text(answer: str) -> None:
    assert messages_of(answer, "assistant") == [{"role": "assistant", "content": answer}]
    assert messages_of({"output": answer}, "assistant") == [{"role": "assistant", "content": answer}]


def test_an_input_as_json_text_is_read() -> None:
    assert messages_of('{"question": "1+1?"}') == [{"role": "user", "content": "1+1?"}]
    assert messages_of('[{"type": "text", "text": "1+1?"}]') == [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"secret": "Mrs Quillfeather"}, "holds no message; its keys are secret"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content of the type 'image_url'"),
        ([{"role": "critic", "content": "x"}], "of the role 'critic'"),
        ([{"role": "user", "content": "x"}, 7], "a message that is no object but int"),
    ],
)
def test_what_cannot_be_trained_on_is_named_and_not_quoted(value: Any, reason: str) -> None:
    with pytest.raises(BadTraceError, match=reason) as raised:
        messages_of(value)
    assert "Quillfeather" not in str(raised.value)


def test_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}]
    flat = {"name": "add", "description": "Adds."}
    for form in (expected, json.dumps(expected), [{**flat, "input_schema": schema}], [{**flat, "parameters": schema}]):
        assert tools_of(form) == expected
    assert tools_of(None) == tools_of("none") == []


def test_the_main_conversation_begins_where_the_agent_began() -> None:
    routing = TracedCall(
        0.0, [{"role": "user", "content": "Which topic? 1+1?"}], [{"role": "assistant", "content": "x"}]
    )
    first, second = TracedCall(1.0, EXPECTED[:2], [EXPECTED[2]]), TracedCall(2.0, EXPECTED[:4], [EXPECTED[4]])
    guard = TracedCall(3.0, [{"role": "user", "content": "Is this safe?"}], [{"role": "assistant", "content": "yes"}])
    prompt, answer, _ = main_conversation([guard, second, routing, first])
    assert (prompt, answer) == (EXPECTED[:2], EXPECTED[2:])
