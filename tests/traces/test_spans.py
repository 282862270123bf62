"""Spans whose messages have the earlier forms of the GenAI conventions, or those of other instrumentations."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft_platform.traces.readers.base import read_traces
from rft_platform.traces.readers.spans import SpanReader
from rft_platform.traces.readers.trace import BadTrace, Trace

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP JSON has them."""
    return [{"key": name, "value": {"stringValue": str(value)}} for name, value in values.items()]


def event(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "timeUnixNano": "1", "attributes": attributes(values)}


def request(span: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {"traceId": "t1", "spanId": "s1", "name": "chat", "startTimeUnixNano": "1000000000", **span}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [whole]}]}], **more}


#: Spans of one call: "Add." and "1+1?" give a call of the tool ``add``.
SPANS: dict[str, dict[str, Any]] = {
    "span events": {"events": [
        event("gen_ai.system.message", content="Add."),
        event("gen_ai.user.message", content="1+1?"),
        event("gen_ai.choice", index=0, finish_reason="tool_calls",
              message=json.dumps({"role": "assistant", "tool_calls": [CALL]})),
    ]},
    "events with the whole content": {"events": [
        event("gen_ai.content.prompt", **{"gen_ai.prompt": json.dumps(
            [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}])}),
        event("gen_ai.content.completion", **{"gen_ai.completion": json.dumps(
            [{"role": "assistant", "content": None, "tool_calls": [CALL]}])}),
    ]},
    "OpenLLMetry": {"attributes": attributes({
        "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Add.",
        "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "1+1?",
        "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.tool_calls.0.id": "c1",
        "gen_ai.completion.0.tool_calls.0.name": "add", "gen_ai.completion.0.tool_calls.0.arguments": "{}",
        "llm.request.functions.0.name": "add",
        "llm.request.functions.0.parameters": json.dumps(TOOL["function"]["parameters"]),
    })},
    "OpenInference": {"attributes": attributes({
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "system", "llm.input_messages.0.message.content": "Add.",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.contents.0.message_content.type": "text",
        "llm.input_messages.1.message.contents.0.message_content.text": "1+1?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": "{}",
        "llm.tools.0.tool.json_schema": json.dumps(TOOL),
    })},
}  # fmt: skip


def read(document: dict[str, Any], folder: Path) -> Trace | BadTrace:
    (folder / "spans.json").write_text(json.dumps(document, indent=1))
    (found,) = read_traces(SpanReader(), str(folder / "spans.json"))
    return found


@pytest.mark.parametrize("form", SPANS)
def test_a_span(form: str, tmp_path: Path) -> None:
    found = read(request(SPANS[form]), tmp_path)
    assert isinstance(found, Trace), found
    assert found.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    assert found.answer == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert found.tools == ([TOOL] if form.startswith("Open") else [])


def test_messages_and_scores_in_logs(tmp_path: Path) -> None:
    details = attributes({
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "1+1?"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "2"}]}]),
    })  # fmt: skip
    score = [
        *attributes({"gen_ai.evaluation.name": "right"}),
        {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.5}},
    ]
    logs = [
        {"traceId": "t1", "spanId": "s1", "eventName": "gen_ai.client.inference.operation.details",
         "attributes": details},
        {"traceId": "t1", "spanId": "s1", "eventName": "gen_ai.evaluation.result", "attributes": score},
    ]  # fmt: skip
    found = read(request({}, resourceLogs=[{"scopeLogs": [{"logRecords": logs}]}]), tmp_path)
    assert isinstance(found, Trace), found
    assert (found.prompt[0]["content"], found.answer[0]["content"], found.scores) == ("1+1?", "2", {"right": 0.5})


def test_spans_without_messages_are_reported(tmp_path: Path) -> None:
    found = read(request({}), tmp_path)
    assert isinstance(found, BadTrace)
    assert (found.trace_id, "has no span with messages" in found.reason) == ("t1", True)
