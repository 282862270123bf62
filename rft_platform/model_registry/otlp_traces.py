"""Send runs of a workflow to an OTLP/HTTP receiver, as spans with the attributes of OpenTelemetry's GenAI conventions.

A run is a span of an agent, a model call is a span below it, and rewards and feedback are events
``gen_ai.evaluation.result``. Ids are digests of the run's id, so that a repeated round sends the same spans.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rft_platform.common.redaction import redact
from rft_platform.model_registry.run_traces import JudgedTranscript

if TYPE_CHECKING:
    from rft_platform.experience.record import RolloutRow

LOG = logging.getLogger(__name__)
_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
_TIMEOUT_S = 10.0
_CLIENT, _INTERNAL = 3, 1  # kinds of spans


def send_traces(endpoint: str, service: str, transcripts: Sequence[JudgedTranscript]) -> int:
    """Send the runs to ``endpoint``; returns their number.

    The headers are those of OTEL_EXPORTER_OTLP_HEADERS. A failure is logged as a warning and 0 is returned: the rows of
    the store are the record.
    """
    import httpx

    if not transcripts:
        return 0
    try:
        answer = httpx.post(
            f"{endpoint.rstrip('/')}/v1/traces",
            content=json.dumps(export_request(service, transcripts)),
            headers={"content-type": "application/json", **_headers()},
            timeout=_TIMEOUT_S,
        )
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        LOG.warning("%s did not take the traces of a round: %s", redact(endpoint), error)
        return 0
    return len(transcripts)


def export_request(service: str, transcripts: Sequence[JudgedTranscript]) -> dict[str, Any]:
    """The runs as the JSON of an OTLP export request; ``service`` is the name of the project."""
    spans = [span for transcript in transcripts for span in _spans(service, transcript)]
    scope = {"scope": {"name": "rft_platform"}, "spans": spans}
    return {
        "resourceSpans": [{"resource": {"attributes": _attributes({"service.name": service})}, "scopeSpans": [scope]}]
    }


def _spans(service: str, transcript: JudgedTranscript) -> Iterator[dict[str, Any]]:
    first, calls = transcript.calls[0], transcript.calls
    end = max(row.call.created_at + row.call.duration_s for row in calls)
    trace_id, root = _digest(service, first.run_id)[:32], _digest(service, first.run_id, "root")[:16]
    known = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": first.taskset,
        "rft.run": first.run_id,
        "rft.round": first.round,
        "rft.group": first.group_id,
        "rft.task": first.task_id,
        **({"rft.dropped_by": transcript.dropped_by} if transcript.dropped_by else {}),
    }
    yield {
        "traceId": trace_id,
        "spanId": root,
        "name": f"invoke_agent {first.taskset}",
        "kind": _INTERNAL,
        **_times(first.call.created_at, end),
        "attributes": _attributes(known),
        "events": [_event(end, found) for found in _evaluations(transcript)],
        "status": {},
    }
    for row in calls:
        yield {
            "traceId": trace_id,
            "spanId": _digest(service, row.row_id)[:16],
            "parentSpanId": root,
            "name": f"chat {row.call.policy}",
            "kind": _CLIENT,
            **_times(row.call.created_at, row.call.created_at + row.call.duration_s),
            "attributes": _attributes(_call(row, with_texts=transcript.with_texts)),
            "status": {},
        }


def _call(row: "RolloutRow", *, with_texts: bool) -> dict[str, Any]:
    call = row.call
    known = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rft_platform",
        "gen_ai.request.model": call.policy,
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.response.id": call.msg_id,
        "gen_ai.response.finish_reasons": [call.finish_reason],
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": len(call.response_ids),
        "rft.row": row.row_id,
        "rft.policy_version": call.policy_version,
    }
    if not with_texts:
        return known
    answer = {**_message({"role": "assistant", **call.response}), "finish_reason": call.finish_reason}
    tools = {"gen_ai.tool.definitions": json.dumps(call.tools, ensure_ascii=False)} if call.tools else {}
    return {
        **known,
        "gen_ai.input.messages": json.dumps(list(map(_message, call.messages)), ensure_ascii=False),
        "gen_ai.output.messages": json.dumps([answer], ensure_ascii=False),
        **tools,
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API with the parts of the conventions."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": "tool", "parts": [part]}
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    parts = [{"type": "text", "content": part["text"]} if part.get("type") == "text" else part for part in texts]
    calls = [
        {
            "type": "tool_call",
            "id": call.get("id"),
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "parts": [*parts, *calls]}


def _evaluations(transcript: JudgedTranscript) -> Iterator[dict[str, Any]]:
    """Rewards of the judge, and what users said."""
    for name, value in transcript.rewards.items():
        yield _evaluation(name, value, None) | {"rft.judge": transcript.judge}
    for given in transcript.feedback:
        yield _evaluation(given.metric, given.value, given.comment) | {"rft.feedback_id": given.feedback_id}


def _evaluation(name: str, value: float | None, explanation: str | None) -> dict[str, Any]:
    scored = {} if value is None else {"gen_ai.evaluation.score.value": float(value)}
    explained = {} if explanation is None else {"gen_ai.evaluation.explanation": explanation}
    return {"gen_ai.evaluation.name": name, **scored, **explained}


def _event(at: float, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": "gen_ai.evaluation.result", "timeUnixNano": _ns(at), "attributes": _attributes(found)}


def _times(start: float, end: float) -> dict[str, str]:
    return {"startTimeUnixNano": _ns(start), "endTimeUnixNano": _ns(end)}


def _ns(seconds: float) -> str:
    return str(int(seconds * 1e9))


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": list(map(_value, value))}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _digest(*names: str) -> str:
    return hashlib.sha256("/".join(names).encode()).hexdigest()


def _headers() -> dict[str, str]:
    pairs = (pair.partition("=") for pair in os.environ.get(_HEADERS, "").split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
