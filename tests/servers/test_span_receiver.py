"""``rft receive``: spans of real exporters, what is refused, redaction, and what `rft import` and `rft forget` do."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft_platform.cli.commands.imports import receiver_lines
from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.rounds.maintenance.forget_imports import Whose, forget_imports
from rft_platform.servers import span_receiver
from rft_platform.servers.span_receiver import receiver_app
from rft_platform.traces.imports import ImportRequest, Imports, read_jsonl
from rft_platform.web_guard.token import access_token
from tests.online.test_forget import files_with
from tests.support.ports import free_port
from tests.support.web import served

TOKEN = "t" * 32
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def no_digits(text: str) -> str:
    return re.sub(r"\d{6,}", "#", text)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def url(home: Home) -> Iterator[str]:
    with served(receiver_app(home, TOKEN, Redaction(no_digits))) as address:
        yield address


@pytest.fixture
def exported(url: str) -> Iterator[Callable[..., str]]:
    """Export the trace of an agent's run with the SDK of OpenTelemetry; returns the trace's id."""
    module = pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the OTLP exporter is not installed"
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = module.OTLPSpanExporter(f"{url}/v1/traces", headers={"Authorization": f"Bearer {TOKEN}"})
    provider = TracerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def export(question: str, answer: str, user: str) -> str:
        with provider.get_tracer("agent").start_as_current_span("agent", attributes={"user.id": user}) as root:
            messages = [{"role": "user", "parts": [{"type": "text", "content": question}]}]
            answers = [{"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "stop"}]
            with provider.get_tracer("agent").start_as_current_span("chat", attributes={
                "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 7,
                "gen_ai.input.messages": json.dumps(messages), "gen_ai.output.messages": json.dumps(answers),
            }) as call:  # fmt: skip
                call.add_event("gen_ai.evaluation.result", {
                    "gen_ai.evaluation.name": "helpful", "gen_ai.evaluation.score.value": 0.75,
                })  # fmt: skip
        assert provider.force_flush()
        return f"{root.get_span_context().trace_id:032x}"

    yield export
    provider.shutdown()


def imported(home: Home) -> tuple[Any, list[dict[str, Any]]]:
    report = Imports(home).run(ImportRequest("live", "otel", str(home.received)), Redaction())
    return report, read_jsonl(Imports(home).file("demonstrations", "live"))


def test_spans_of_the_sdk_are_imported_once_and_redacted_before_they_are_stored(
    home: Home, exported: Callable[..., str]
) -> None:
    traces = [
        exported(f"Where is order 123456{number}?", f"Order 123456{number} left.", f"u{number}") for number in (1, 2)
    ]
    report, rows = imported(home)
    assert (report.imported, report.bad, report.scores) == (2, 0, {"helpful": 2})
    assert [row["imported_from"][0]["id"] for row in rows] == traces
    assert [message["content"] for message in rows[0]["messages"]] == ["Where is order #?", "Order # left."]
    assert files_with(home.root, "1234561") == []
    assert imported(home)[1] == rows
    later = exported("And now?", "It came.", "1")
    assert [row["imported_from"][0]["id"] for row in imported(home)[1]] == [*traces, later]
    assert {file.stat().st_mode & 0o077 for file in home.received.iterdir()} == {0}


def test_a_repeated_request_adds_no_trace(home: Home, url: str, exported: Callable[..., str]) -> None:
    exported("Hello?", "Hello.", "u1")
    (file,) = home.received.glob("*.jsonl")
    request = json.loads(file.read_text())
    assert httpx.post(f"{url}/v1/traces", json=request, headers=HEADERS).json() == {}
    assert len(file.read_text().splitlines()) == 2
    report, rows = imported(home)
    assert (report.imported, len(rows), len(rows[0]["messages"])) == (1, 1, 2)


def test_forgotten_traces_are_erased_and_stay_away(home: Home, url: str, exported: Callable[..., str]) -> None:
    exported("Where is the blue kettle?", "It left.", "ann")
    kept = exported("Where is the red kettle?", "It left.", "bob")
    (file,) = home.received.glob("*.jsonl")
    hers = json.loads(file.read_text().splitlines()[0])
    assert forget_imports(home, None, None, Whose(subject="ann")) is not None  # before any import
    assert files_with(home.root, "blue kettle") == files_with(home.root, '"ann"') == []
    assert [row["imported_from"][0]["id"] for row in imported(home)[1]] == [kept]
    assert httpx.post(f"{url}/v1/traces", json=hers, headers=HEADERS).status_code == 200
    exported("Where is the blue kettle now?", "It came.", "ann")
    assert files_with(home.root, "blue kettle") == []
    assert forget_imports(home, None, None, Whose(trace_ids=frozenset({kept}))) is not None
    assert files_with(home.root, "red kettle") == []


def test_a_line_that_a_killed_receiver_left_is_the_only_one_lost(home: Home, url: str) -> None:
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "chat", "startTimeUnixNano": "1"}
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    assert httpx.post(f"{url}/v1/traces", json=request, headers=HEADERS).status_code == 200
    (file,) = home.received.glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    assert httpx.post(f"{url}/v1/traces", json=request, headers=HEADERS).status_code == 200
    assert file.read_bytes().splitlines() == [whole.strip(), whole[:40], whole.strip()]


def test_what_is_no_export_request_is_refused_with_the_reason(
    home: Home, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(body: bytes, kind: str = "application/json", **headers: str) -> tuple[int, str]:
        given = {"content-type": kind, **HEADERS, **headers}
        answer = httpx.post(f"{url}/v1/traces", content=body, headers=given)
        return answer.status_code, answer.text

    assert httpx.post(f"{url}/v1/traces", json={}).status_code == 401
    assert sent(b"{}", authorization="Bearer wrong")[0] == 401
    assert sent(b"{}", host="evil.example")[0] == 403
    assert sent(b"{}", "text/plain")[0] == 415
    for body in (b"", b"[]", b"{", b'{"a": 1}', b'{"resourceSpans": 3}', b'{"resourceSpans": [{"scopeSpans": [7]}]}'):
        assert sent(body)[0] == 400, body
    assert sent(b"\xff\xff", "application/x-protobuf")[0] == 400
    assert sent(b"no gzip", **{"content-encoding": "gzip"})[0] == 400
    assert httpx.get(f"{url}/healthz").text == "ok\n"
    monkeypatch.setattr(span_receiver, "MAX_REQUEST_BYTES", 10_000)
    large = b'{"resourceSpans": [], "a": "' + b"x" * 20_000 + b'"}'
    assert sent(large)[0] == sent(gzip.compress(large), **{"content-encoding": "gzip"})[0] == 413
    assert not home.received.exists()


def test_a_redaction_that_fails_stores_nothing_and_the_exporter_may_try_again(home: Home) -> None:
    def fails(text: str) -> str:
        raise ValueError(text)

    attribute = {"key": "gen_ai.prompt", "value": {"stringValue": "a secret"}}
    span = {
        "traceId": "a" * 32,
        "spanId": "b" * 16,
        "name": "chat",
        "startTimeUnixNano": "1",
        "attributes": [attribute],
    }
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    with served(receiver_app(home, TOKEN, Redaction(fails))) as address:
        answer = httpx.post(f"{address}/v1/traces", json=request, headers=HEADERS)
    assert answer.status_code == 503 and "secret" not in answer.text
    assert files_with(home.root, "secret") == []


def headers_set_by(variables: str, environment: dict[str, str]) -> str:
    """``OTEL_EXPORTER_OTLP_HEADERS`` in a shell that has run the printed line."""
    command = f'{variables}\nprintf %s "$OTEL_EXPORTER_OTLP_HEADERS"'
    done = subprocess.run(
        ["sh", "-c", command], env={"PATH": os.defpath, **environment}, capture_output=True, text=True
    )
    return done.stdout


def test_an_exporter_is_told_where_the_token_is(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RFT_WEB_TOKEN", raising=False)
    place = Home(tmp_path / "my home")
    token = access_token(place.web_token)
    lines = receiver_lines(place, "127.0.0.1", 4318)
    assert token not in "".join(lines.values())
    assert headers_set_by(lines["exporter"], {}) == f"Authorization=Bearer%20{token}"
    assert lines["exporter"].startswith("export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 ")
    monkeypatch.setenv("RFT_WEB_TOKEN", TOKEN)
    assert "$RFT_WEB_TOKEN" in receiver_lines(home, "127.0.0.1", 4318)["exporter"]


@pytest.mark.slow
def test_the_command_prints_its_address_when_it_listens_and_ends_on_ctrl_c(home: Home) -> None:
    port = free_port()
    environment = {**os.environ, "RFT_HOME": str(home.root), "RFT_WEB_TOKEN": TOKEN, "COLUMNS": "200"}
    command = [sys.executable, "-P", "-m", "rft_platform", "receive", "--port", str(port)]
    span = {"traceId": "a" * 32, "spanId": "b" * 16, "name": "chat"}
    request = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().split()[1]
        variables, status = receiver.stdout.readline(), httpx.post(address, json=request, headers=HEADERS).status_code
        receiver.send_signal(signal.SIGINT)
        rest = receiver.stdout.read()
    assert (address, status) == (f"http://127.0.0.1:{port}/v1/traces", 200)
    assert receiver.returncode == 0 and rest.splitlines()[-1] == "stopped"
    assert variables.startswith("exporter ") and TOKEN not in variables
    headers = headers_set_by(variables.removeprefix("exporter "), {"RFT_WEB_TOKEN": TOKEN})
    assert headers == f"Authorization=Bearer%20{TOKEN}"
    assert f"rft import {home.received} --format otel" in rest
    assert len(list(home.received.glob("*.jsonl"))) == 1
