"""Runs of a round as traces in MLflow, looked up through MLflow's client."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.experience.record import JudgedRow
from rft_platform.model_registry.mlflow_client import guarded
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.otlp_traces import export_request, send_traces
from rft_platform.model_registry.run_traces import delete_traces, log_traces
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, read, write
from rft_platform.rounds.reporting.run_log import log_round_traces, spread, transcripts
from rft_platform.traces.readers.base import read_traces
from rft_platform.traces.readers.spans import SpanReader
from rft_platform.traces.readers.trace import Trace
from tests.experience.samples import step_row

RUNS = 5


def judge(project: Project, version: str, shift: float = 0.0) -> None:
    rows = [
        JudgedRow(row.row_id, row.group_id, row.run_id, row.step, float(row.run_id[-1]) + shift, {"form": 0.5}, version,
                  0.0, "too_long" if row.run_id == "run-4" else None)
        for row in project.store.rollout_rows(1)
    ]  # fmt: skip
    project.store.write_judged(1, version, rows)
    write(project.store, 1, Judged(judge_names={version: "llm"}, judge_kinds={version: "model"}))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    opened = Project(Home(tmp_path), build_config({"project": "demo", "name": "first", "monitor": {"traces": 3}}))
    rows = [
        step_row(f"run-{run}", step, response_ids=[3], prompt_ids=[1, 2], task_id="t", taskset="sums", group_id="g",
                 messages=[{"role": "user", "content": f"question {run}"}],
                 response={"role": "assistant", "content": f"answer {step}"}, created_at=1e9 + step, duration_s=0.5)
        for run in range(RUNS)
        for step in range(2)
    ]  # fmt: skip
    opened.store.write_rollouts(1, 0, rows)
    judge(opened, "judge-1")
    return opened


@pytest.fixture
def connected(empty_store: Path, tmp_path: Path) -> Callable[[], ModelRegistry]:
    database = tmp_path / "mlflow" / "mlflow.db"
    database.parent.mkdir()
    database.write_bytes(empty_store.read_bytes())
    return lambda: ModelRegistry(f"sqlite:///{database}", tmp_path / "mlflow" / "artifacts", "demo", "demo-model")


class Receiver(BaseHTTPRequestHandler):
    """Keeps what was sent."""

    received: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, dict(self.headers), body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def receiver() -> Iterator[str]:
    """A receiver of OTLP/HTTP on loopback."""
    Receiver.received.clear()
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_runs_are_sent_as_spans_that_an_import_reads(
    project: Project, receiver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc,x-project=demo")
    assert send_traces(receiver, "demo-first", transcripts(project, read(project.store, 1), 3)) == 3
    assert send_traces(receiver, "demo-first", transcripts(project, read(project.store, 1), 3)) == 3
    (path, headers, first), (_, _, second) = Receiver.received
    assert (path, first) == ("/v1/traces", second), "a repeated stage sends the same spans"
    assert (headers["authorization"], headers["x-project"]) == ("Basic abc", "demo")
    (tmp_path / "spans.json").write_bytes(first)
    sent = [trace for trace in read_traces(SpanReader(), str(tmp_path / "spans.json")) if isinstance(trace, Trace)]
    found = {trace.prompt[0]["content"]: trace for trace in sent}
    assert set(found) == {"question 0", "question 2", "question 4"}
    best = found["question 4"]
    assert best.answer == [{"role": "assistant", "content": "answer 1"}]
    assert (best.scores, best.duration_s) == ({"reward": 4.0, "form": 0.5}, 1.5)


def test_a_receiver_gets_no_texts_of_production_traffic(project: Project) -> None:
    (chosen,) = transcripts(project, read(project.store, 1), 1)
    assert "question" in str(export_request("demo", [chosen]))
    assert "question" not in str(export_request("demo", [replace(chosen, with_texts=False)]))


def test_an_unreachable_trace_receiver_is_only_logged(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    assert send_traces("http://user:secret@127.0.0.1:9", "demo", transcripts(project, read(project.store, 1), 1)) == 0
    assert "did not take the traces of a round" in caplog.text
    assert "secret" not in caplog.text
    assert send_traces("http://127.0.0.1:9", "demo", []) == 0


@pytest.mark.slow
def test_an_unreachable_mlflow_is_only_logged(
    project: Project, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://127.0.0.1:9"
    run: Any = SimpleNamespace(client=guarded(MlflowClient(uri, uri), uri), run_id="a", experiment_id="1")
    assert log_traces(run, uri, transcripts(project, read(project.store, 1), 1)) == 0
    assert "MLflow did not take the traces of a round" in caplog.text


def test_settings_of_a_receiver() -> None:
    def findings(**changes: Any) -> str:
        config = build_config({"monitor": {"otlp_endpoint": "http://127.0.0.1:4318"}, **changes})
        return str(list(settings_findings(resolve(config), Machine(2, 0))))

    online = {"buffer": {"trainer_input": {"experience_buffer": {"storage_type": "sql"}}}}
    assert "monitor.otlp_endpoint has no effect while monitor.traces is 0" in findings()
    assert "`rft forget` cannot erase what a receiver has" in findings(**online)


@pytest.mark.slow
def test_a_few_runs_of_a_round_become_traces_with_assessments(
    project: Project, connected: Callable[[], ModelRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft_platform.model_registry.run_traces._PAGE", 2)  # the traces of a round take several pages
    assert log_round_traces(project, connected(), read(project.store, 1)) == 3
    assert log_round_traces(project, connected(), read(project.store, 1)) == 3, "a repeated stage adds none"
    judge(project, "judge-2", shift=1.0)
    assert log_round_traces(project, connected(), read(project.store, 1)) == 3

    run = connected().training_run("first")
    experiment = run.client.get_run(run.run_id).info.experiment_id
    traces = run.client.search_traces(
        locations=[experiment], filter_string=f"attributes.run_id = '{run.run_id}' AND tags.`rft.round` = '1'"
    )
    assert sorted(trace.info.tags["rft.workflow_run"] for trace in traces) == ["run-0", "run-2", "run-4"]
    best = next(trace for trace in traces if trace.info.tags["rft.workflow_run"] == "run-4")
    assert best.info.tags["rft.dropped_by"] == "too_long"
    root, *calls = sorted(best.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns))
    assert root.inputs == {"messages": [{"role": "user", "content": "question 4"}]}
    assert [call.outputs["content"] for call in calls] == ["answer 0", "answer 1"]
    assert {call.span_type for call in calls} == {"CHAT_MODEL"} and all(c.parent_id == root.span_id for c in calls)
    assert best.info.execution_duration == 1500
    found = {
        (each.name, each.source.source_id): (each.value, each.source.source_type) for each in best.info.assessments
    }
    assert found == {
        ("reward", "llm judge-1"): (4.0, "LLM_JUDGE"), ("form", "llm judge-1"): (0.5, "LLM_JUDGE"),
        ("reward", "llm judge-2"): (5.0, "LLM_JUDGE"), ("form", "llm judge-2"): (0.5, "LLM_JUDGE"),
    }  # fmt: skip
    assert delete_traces(run, connected().tracking_uri, 1, ["run-0", "run-2", "run-4"]) == 3


def test_the_runs_are_spread_over_the_rewards(project: Project) -> None:
    assert [each.rewards["reward"] for each in transcripts(project, read(project.store, 1), 2)] == [0.0, 4.0]
    assert len(transcripts(project, read(project.store, 1), 99)) == RUNS
    assert spread(["a", "b", "c"], 1) == ["a"] and spread([], 4) == []
    assert transcripts(project, read(project.store, 2), 4) == []
