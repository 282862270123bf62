"""Make the files of ``tests/traces/exports`` with the libraries of the tracing tools, in an environment that has them.

    python -m venv /tmp/sdks && /tmp/sdks/bin/pip install langsmith langfuse opentelemetry-sdk \
        opentelemetry-exporter-otlp-json-file
    /tmp/sdks/bin/python tests/traces/make_exports.py otel|langsmith|langfuse 18 FILE
    # langfuse 3 (``pip install "langfuse<4"``) has the traces of the API's version 1: format langfuse-traces

The libraries: an OpenTelemetry SDK with the GenAI attributes writes its spans through the OTLP JSON file exporter; the
LangSmith SDK sends its runs and feedback to a server on loopback, and what the server received is merged as LangSmith
does; of Langfuse, the records are the models of its API client.
"""

import json
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scenarios import Scenario, scenario

PROJECT = "0b5a51a6-64f3-4f39-9d1b-1a1e6e3f7a11"


def otel(scenarios: list[Scenario], file: Path) -> None:
    """Spans of an agent, with the messages in the form of the conventions of 2025."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
    provider.add_span_processor(BatchSpanProcessor(FileSpanExporter(str(file)), max_export_batch_size=5))
    tracer = provider.get_tracer("shop.agent")
    for one in scenarios:
        at = one.started_at * 10**9
        root = tracer.start_span(
            "invoke_agent shop", start_time=at, attributes={"gen_ai.operation.name": "invoke_agent"}
        )
        if one.user:
            root.set_attribute("user.id", one.user)
        context = trace.set_span_in_context(root)
        for index, (messages, answer) in enumerate(one.calls):
            instructions, asked = messages[0], messages[1:]
            span = tracer.start_span("chat tiny", context, start_time=at + (2 * index + 1) * 10**9, attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "openai",
                "gen_ai.request.model": "tiny",
                "gen_ai.system_instructions": json.dumps([{"type": "text", "content": instructions["content"]}]),
                "gen_ai.input.messages": json.dumps([_parts(message) for message in asked]),
                "gen_ai.output.messages": json.dumps([{**_parts(answer), "finish_reason": "stop"}]),
                **({"gen_ai.tool.definitions": json.dumps([tool["function"] for tool in one.tools])}
                   if one.tools else {}),
            })  # fmt: skip
            span.end(at + (2 * index + 2) * 10**9)
        if one.helpful is not None:
            found = {"gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": one.helpful}
            root.add_event("gen_ai.evaluation.result", found, timestamp=at + 8 * 10**9)
        if one.failed:
            root.set_status(trace.Status(trace.StatusCode.ERROR, "time-out"))
        root.end(at + 9 * 10**9)
    provider.shutdown()


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}
        return {"role": "tool", "parts": [part]}
    parts = [{"type": "text", "content": message["content"]}] if message["content"] else []
    parts += [
        {"type": "tool_call", "id": call["id"], "name": call["function"]["name"],
         "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    return {"role": message["role"], "parts": parts}


def langsmith(scenarios: list[Scenario], file: Path) -> None:
    """Runs of an agent with calls as LangSmith's wrapper of OpenAI's client records them, and feedback."""
    from langsmith import Client
    from langsmith.run_trees import RunTree

    with _collector() as (url, received):
        client = Client(api_url=url, api_key="none", auto_batch_tracing=False, info={})
        for one in scenarios:
            at = datetime.fromtimestamp(one.started_at, UTC)
            question = one.calls[0][0][-1]["content"]
            root = RunTree(
                name="shop", run_type="chain", inputs={"question": question}, start_time=at, client=client,
                project_name="shop", extra={"metadata": {"user_id": one.user} if one.user else {}},
            )  # fmt: skip
            root.post()
            for index, (messages, answer) in enumerate(one.calls):
                call = root.create_child(
                    name="ChatOpenAI", run_type="llm", inputs={"messages": messages, "model": "tiny"},
                    start_time=at + timedelta(seconds=2 * index + 1),
                    extra={"invocation_params": {"model": "tiny", **({"tools": one.tools} if one.tools else {})}},
                )  # fmt: skip
                call.post()
                choice = {"index": 0, "finish_reason": "stop", "message": answer}
                call.end(
                    outputs={"object": "chat.completion", "choices": [choice]},
                    end_time=at + timedelta(seconds=2 * index + 2),
                )
                call.patch()
            last = one.calls[-1][1]["content"]
            end = at + timedelta(seconds=9)
            root.end(**({"error": "time-out"} if one.failed else {"outputs": {"output": last}}), end_time=end)
            root.patch()
            if one.helpful is not None:
                client.create_feedback(root.id, key="helpful", score=one.helpful)
            if one.correction is not None:
                client.create_feedback(root.id, key="note", correction={"answer": one.correction})
    for run in received["runs"].values():  # what describes this machine
        run["extra"].pop("runtime", None)
        run["extra"]["metadata"].pop("revision_id", None)
    lines = [*received["runs"].values(), *received["feedback"]]
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


class _collector:
    """A server on loopback that takes runs and feedback, and merges the updates of runs."""

    def __enter__(self) -> tuple[str, dict[str, Any]]:
        received: dict[str, Any] = {"runs": {}, "feedback": []}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path.startswith("/runs"):
                    run = received["runs"].setdefault(self.path.removeprefix("/runs/") if self.command == "PATCH"
                                                      else body["id"], {})  # fmt: skip
                    run.update({name: value for name, value in body.items() if value is not None or name not in run})
                else:
                    received["feedback"].append(body)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            do_PATCH = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}", received

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()


def langfuse(scenarios: list[Scenario], file: Path) -> None:
    """Observations and scores, as the API's lists of version 2 and 3 return them."""
    from langfuse.api import ObservationV2, ScoreSubjectV3_Trace, ScoreV3_Correction, ScoreV3_Numeric

    records: list[Any] = []
    for one in scenarios:
        trace_id, at = f"{one.number:032x}", datetime.fromtimestamp(one.started_at, UTC)
        shared = {"trace_id": trace_id, "project_id": "shop", "user_id": one.user, "trace_name": "shop"}
        records.append(ObservationV2(
            **shared, id=f"{one.number:08x}root", type="AGENT", name="shop", start_time=at, is_root_observation=True,
            end_time=at + timedelta(seconds=9), level="ERROR" if one.failed else "DEFAULT",
            input=json.dumps({"question": one.calls[0][0][-1]["content"]}), output=one.calls[-1][1]["content"],
        ))  # fmt: skip
        for index, (messages, answer) in enumerate(one.calls):
            asked = {"messages": messages, **({"tools": one.tools} if one.tools else {})}
            records.append(ObservationV2(
                **shared, id=f"{one.number:08x}{index:08x}", type="GENERATION", name="chat", model="tiny",
                parent_observation_id=f"{one.number:08x}root", start_time=at + timedelta(seconds=2 * index + 1),
                end_time=at + timedelta(seconds=2 * index + 2), level="DEFAULT",
                input=json.dumps(asked, ensure_ascii=False), output=json.dumps(answer, ensure_ascii=False),
            ))  # fmt: skip
        given = {
            "project_id": "shop", "source": "ANNOTATION", "timestamp": at, "environment": "default", "created_at": at,
            "updated_at": at, "subject": ScoreSubjectV3_Trace(kind="trace", id=trace_id),
        }  # fmt: skip
        if one.helpful is not None:
            records.append(ScoreV3_Numeric(
                **given, id=f"{one.number:08x}s", name="helpful", value=one.helpful, data_type="NUMERIC"
            ))  # fmt: skip
        if one.correction is not None:
            records.append(ScoreV3_Correction(
                **given, id=f"{one.number:08x}c", name="output", value=one.correction, data_type="CORRECTION"
            ))  # fmt: skip
    _write(records, file)


def langfuse_traces(scenarios: list[Scenario], file: Path) -> None:
    """Traces with their observations and scores, as version 1 of the API returns them."""
    from langfuse.api import ObservationsView, ScoreV1_Categorical, ScoreV1_Numeric, TraceWithFullDetails

    records = []
    for one in scenarios:
        trace_id, at = f"{one.number:032x}", datetime.fromtimestamp(one.started_at, UTC)
        observations = [
            ObservationsView(
                id=f"{one.number:08x}{index:08x}", trace_id=trace_id, type="GENERATION", name="chat", model="tiny",
                start_time=at + timedelta(seconds=2 * index + 1), end_time=at + timedelta(seconds=2 * index + 2),
                level="ERROR" if one.failed else "DEFAULT",
                input={"messages": messages, "tools": one.tools} if one.tools else messages, output=answer,
                usage={"input": 1, "output": 1, "total": 2}, usage_details={}, cost_details={}, environment="default",
            )
            for index, (messages, answer) in enumerate(one.calls)
        ]  # fmt: skip
        given = {
            "trace_id": trace_id, "source": "API", "timestamp": at, "created_at": at, "updated_at": at,
            "environment": "default",
        }  # fmt: skip
        scores: list[Any] = [
            ScoreV1_Categorical(
                **given, id=f"{one.number:08x}k", name="topic", value=2, string_value="orders", data_type="CATEGORICAL"
            )
        ]
        if one.helpful is not None:
            numeric = {"name": "helpful", "value": one.helpful, "data_type": "NUMERIC"}
            scores.append(ScoreV1_Numeric(**given, **numeric, id=f"{one.number:08x}s"))
        records.append(TraceWithFullDetails(
            id=trace_id, timestamp=at, name="shop", user_id=one.user, tags=[], public=False, environment="default",
            html_path=f"/project/shop/traces/{trace_id}", latency=9.0, total_cost=0.0, observations=observations,
            scores=scores, input=one.calls[0][0], output=one.calls[-1][1],
        ))  # fmt: skip
    _write(records, file)


def _write(records: list[Any], file: Path) -> None:
    lines = [
        json.dumps(_aliased(record), ensure_ascii=False)
        if hasattr(type(record), "model_fields")
        else record.json(by_alias=True, exclude_none=True, ensure_ascii=False)  # langfuse 3: Pydantic 1
        for record in records
    ]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _aliased(record: Any) -> Any:
    """The record with the names that the API has on the wire, by the SDK's own conversion."""
    from langfuse.api.core.serialization import convert_and_respect_annotation_metadata

    values = record.model_dump(mode="json", exclude_none=True)
    return convert_and_respect_annotation_metadata(object_=values, annotation=type(record), direction="write")


def made(count: int) -> Iterator[Scenario]:
    """The first scenarios."""
    return map(scenario, range(count))


if __name__ == "__main__":
    maker, number, target = sys.argv[1:]
    makers = {"otel": otel, "langsmith": langsmith, "langfuse": langfuse, "langfuse-traces": langfuse_traces}
    makers[maker](list(made(int(number))), Path(target))
