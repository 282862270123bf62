"""OpenTelemetry spans with GenAI attributes, from OTLP JSON: files of a collector's or an SDK's file exporter.

Messages are read from the attributes of the GenAI conventions (``gen_ai.input.messages``), from their earlier span
events (``gen_ai.user.message``, ``gen_ai.content.prompt``), and from the numbered attributes of OpenLLMetry
(``gen_ai.prompt.0.content``) and OpenInference (``llm.input_messages.0.message.content``). Scores are events
``gen_ai.evaluation.result``, in spans or in logs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rft_platform.tasks.messages import Message
from rft_platform.traces.readers.base import Record, file_documents, mean_scores
from rft_platform.traces.readers.messages import messages_of, tools_of
from rft_platform.traces.readers.trace import BadTraceError, Trace, TracedCall, main_conversation

_CALLS = ("chat", "text_completion", "generate_content")  # of gen_ai.operation.name
_EVALUATION, _DETAILS = "gen_ai.evaluation.result", "gen_ai.client.inference.operation.details"
#: Attributes that name the person whose request a trace is.
SUBJECTS = ("user.id", "enduser.id", "enduser.pseudo.id", "langfuse.user.id", "session.user_id")
_ERROR = (2, "STATUS_CODE_ERROR", "ERROR")
_EVENT_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
#: The parts of an export request: resources, scopes, and spans or log records.
LEVELS = (("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords"))


class SpanReader:
    """Reads OTLP JSON."""

    def documents(self, source: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
        """The export requests of the files."""
        return file_documents(source)

    def records(self, document: Any) -> Iterable[tuple[str, Record]]:
        """Spans, and the log records that belong to a span."""
        found = False
        for kind, scopes, items in LEVELS:
            for resource in document.get(kind) or ():
                shared = _attributes(resource.get("resource") or {})
                for scope in resource.get(scopes) or ():
                    for item in scope.get(items) or ():
                        found = True
                        if item.get("traceId"):
                            yield str(item["traceId"]), {**item, "attributes": {**shared, **_attributes(item)}}
        if not found and not any(name in document for name in ("resourceSpans", "resourceLogs", "resourceMetrics")):
            raise BadTraceError("is no OTLP JSON: it has no resourceSpans")

    def trace(self, trace_id: str, records: list[Record]) -> Trace:
        """The trace of its spans."""
        whole = (one for one in records if "spanId" in one and "name" in one)
        spans = sorted({one["spanId"]: one for one in whole}.values(), key=_start)  # exporters may repeat a request
        logs = [one for one in records if "startTimeUnixNano" not in one]
        if not spans:
            raise BadTraceError("has no spans")
        for log in logs:
            _add_details(log, spans)
        root = next((span for span in spans if not span.get("parentSpanId")), spans[0])
        prompt, answer, tools = main_conversation(_calls(spans))
        ended = max(int(span.get("endTimeUnixNano") or span["startTimeUnixNano"]) for span in spans) / 1e9
        subjects = (str(span["attributes"][name]) for span in spans for name in SUBJECTS if name in span["attributes"])
        return Trace(
            trace_id, None, prompt, answer, tools, mean_scores(_scores(spans, logs)),
            subject=next(subjects, None), started_at=_start(spans[0]), duration_s=ended - _start(spans[0]),
            failed=(root.get("status") or {}).get("code") in _ERROR,
        )  # fmt: skip


def _calls(spans: list[Record]) -> list[TracedCall]:
    """The spans of model calls; in a trace without them, the spans of agents that hold messages."""
    found = [(span, _messages(span)) for span in spans]
    read = [(span, *messages) for span, messages in found if messages is not None and messages[0]]
    chosen = [one for one in read if _is_call(one[0])] or read
    if not chosen:
        raise BadTraceError("has no span with messages; tracing libraries record them only if that is switched on")
    return [TracedCall(_start(span), inputs, outputs, _tools(span["attributes"])) for span, inputs, outputs in chosen]


def _is_call(span: Record) -> bool:
    found = span["attributes"]
    return found.get("gen_ai.operation.name") in _CALLS or found.get("openinference.span.kind") == "LLM"


def _messages(span: Record) -> tuple[list[Message], list[Message]] | None:
    """The input and output messages of a span; None if it has none."""
    found = span["attributes"]
    if "gen_ai.input.messages" in found or "gen_ai.output.messages" in found:
        system = messages_of(found.get("gen_ai.system_instructions"), "system")
        inputs = messages_of(found.get("gen_ai.input.messages"))
        return [*system, *inputs], messages_of(found.get("gen_ai.output.messages"), "assistant")[:1]
    for input_prefix, output_prefix in (
        ("gen_ai.prompt", "gen_ai.completion"),
        ("llm.input_messages", "llm.output_messages"),
    ):
        if input_rows := _numbered(found, input_prefix):
            return messages_of(input_rows), messages_of(_numbered(found, output_prefix), "assistant")[:1]
    return _of_events(span)


def _of_events(span: Record) -> tuple[list[Message], list[Message]] | None:
    inputs, outputs = list[Message](), list[Message]()
    for event in span.get("events") or ():
        name, found = event.get("name"), _attributes(event)
        if name == "gen_ai.content.prompt":
            inputs += messages_of(found.get("gen_ai.prompt"))
        elif name == "gen_ai.content.completion":
            outputs += messages_of(found.get("gen_ai.completion"), "assistant")
        elif name == "gen_ai.choice":
            outputs += messages_of(found.get("message") or found, "assistant")
        elif name == _DETAILS:
            return _messages({"attributes": found})
        elif name in _EVENT_ROLES:
            inputs += messages_of([{"role": _EVENT_ROLES[name], **found}])
    return (inputs, outputs[:1]) if inputs else None


def _tools(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "gen_ai.tool.definitions" in found:
        return tools_of(found["gen_ai.tool.definitions"])
    schemas = [tool.get("tool", tool).get("json_schema") for tool in _numbered(found, "llm.tools")]
    return tools_of([schema for schema in schemas if schema]) or tools_of(_numbered(found, "llm.request.functions"))


def _numbered(found: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Attributes such as ``PREFIX.0.message.role`` as a list of nested objects."""
    root: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith(f"{prefix}.") and name[len(prefix) + 1 :].split(".")[0].isdigit():
            *path, last = name[len(prefix) + 1 :].split(".")
            node = root
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
    return [_unwrapped(_listed(entry)) for _, entry in sorted(root.items(), key=lambda item: int(item[0]))]


def _listed(node: Any) -> Any:
    """Objects whose keys are all numbers, as lists."""
    if not isinstance(node, dict):
        return node
    entries = {name: _listed(value) for name, value in node.items()}
    if entries and all(name.isdigit() for name in entries):
        return [entries[name] for name in sorted(entries, key=int)]
    return entries


def _unwrapped(entry: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenInference without the names that it repeats: ``message``, ``tool_call``, ``message_content``."""
    message = entry.get("message", entry) if isinstance(entry.get("message"), dict) else entry
    calls = [call.get("tool_call", call) for call in message.get("tool_calls") or ()]
    parts = [part.get("message_content", part) for part in message.get("contents") or ()]
    return {**message, **({"tool_calls": calls} if calls else {}), **({"content": parts} if parts else {})}


def _scores(spans: list[Record], logs: list[Record]) -> Iterator[tuple[str, Any]]:
    events = [event for span in spans for event in span.get("events") or ()]
    for found in [_attributes(event) for event in events if event.get("name") == _EVALUATION] + [
        log["attributes"] for log in logs if _name(log) == _EVALUATION
    ]:
        value = found.get("gen_ai.evaluation.score.value", found.get("gen_ai.evaluation.score.label"))
        yield str(found.get("gen_ai.evaluation.name", "score")), value


def _add_details(log: Record, spans: list[Record]) -> None:
    """Add the messages of a log record to its span."""
    if _name(log) == _DETAILS:
        for span in spans:
            if span["spanId"] == log.get("spanId"):
                span["attributes"].update(log["attributes"])


def _name(log: Record) -> Any:
    return log.get("eventName") or log["attributes"].get("event.name")


def _start(span: Record) -> float:
    return int(span["startTimeUnixNano"]) / 1e9


def _attributes(item: Mapping[str, Any]) -> dict[str, Any]:
    found = item.get("attributes") or []
    return (
        dict(found)
        if isinstance(found, Mapping)
        else {one["key"]: _value(one.get("value") or {"stringValue": ""}) for one in found}
    )


def _value(value: Mapping[str, Any]) -> Any:
    """An attribute's value; lists and objects as such."""
    kind, found = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(one) for one in found.get("values") or ()]
    if kind == "kvlistValue":
        return {one["key"]: _value(one.get("value") or {"stringValue": ""}) for one in found.get("values") or ()}
    return int(found) if kind == "intValue" else json.loads(json.dumps(found))
