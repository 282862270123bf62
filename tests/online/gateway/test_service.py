"""The service over HTTP, before a real engine: OpenAI clients, feedback, commits, and what existing clients send."""

import json
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.inference.serving.http_server import server_config
from rft_platform.online.gateway import proxy
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.limits import RateLimits
from rft_platform.online.gateway.proxy import TrafficApp
from rft_platform.online.gateway.request_bodies import FeedbackRequest
from rft_platform.online.releases.routing import ServedEngine
from rft_platform.online.traffic.database import Call, open_database
from rft_platform.online.traffic.declared_metrics import DeclaredMetrics, Metric, MetricError
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.selection import SamplingRateStrategy, Selection, SelectionContext
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.rollout.recording.clients import RecordingClients

QUESTION = [{"role": "user", "content": "What is 12*7?"}]


class Service:
    """A running service and its store."""

    def __init__(
        self,
        engine: PolicyEngine,
        folder: Path,
        *,
        rate: float = 1.0,
        keys: dict[str, str] | None = None,
        most_waiting: int = 10_000,
        limits: RateLimits | None = None,
        metrics: DeclaredMetrics | None = None,
        sampling: SamplingParams | None = None,
        most_choices: int = 8,
    ):
        self.store = TrafficStore(open_database(f"sqlite:///{folder / 'traffic.db'}"))
        writer = TrafficWriter(self.store, most_waiting)
        status = engine.status()

        def find() -> ServedEngine:
            clients = RecordingClients(engine.base_url, 60.0, api_key=engine.api_key)
            return ServedEngine(status, clients, engine.base_url)

        self.gateway = TrafficApp(
            find,
            writer,
            Selection([SamplingRateStrategy.of(rate)]),
            sampling or SamplingParams(max_tokens=8),
            tenants=keys,
            model_name="shop/helper",
            limits=limits,
            most_choices=most_choices,
        )
        self.limits = limits
        app = build_app(self.gateway, writer, TrafficReader(), CommitRule(), limits=limits, metrics=metrics)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(server_config(app, 1, log_config=None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def client(self, key: str = "dummy") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, content: bytes | str, **headers: str) -> httpx.Response:
        given = {"content-type": "application/json", **headers}
        return httpx.post(self.url + path, content=content, headers=given, trust_env=False, timeout=60)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture
def service(policy_engine: PolicyEngine, tmp_path: Path) -> Iterator[Service]:
    service = Service(policy_engine, tmp_path)
    yield service
    service.close()


def test_a_chat_is_served_recorded_rated_and_committed(service) -> None:
    answer = service.client().chat.completions.create(model="any", messages=QUESTION, max_tokens=5, temperature=0.5)
    assert answer.id
    assert answer.choices[0].message.role == "assistant"
    rated = service.post("/feedback", json.dumps({"msg_ids": [answer.id], "reward": 0.8}))
    assert (rated.status_code, rated.json()) == (
        200, {"status": "success", "matched": 1, "duplicate": 0, "late": 0, "unknown": []},
    )  # fmt: skip
    again = service.post("/feedback", json.dumps({"msg_ids": [answer.id], "reward": 0.8})).json()
    assert (again["matched"], again["duplicate"]) == (0, 1)
    assert service.post("/commit", "").json() == {"status": "success", "committed": 1, "pending_groups": 0}
    (row,) = service.store.settle(1)
    assert row.reward == 0.8
    assert row.model_call["temperature"] == 0.5
    assert len(row.model_call["response_ids"]) == len(row.model_call["rollout_logprobs"]) > 0
    assert row.model_call["messages"] == QUESTION


def test_streams_and_choices_are_recorded(service) -> None:
    events = list(
        service.client().chat.completions.create(model="any", messages=QUESTION, max_tokens=5, stream=True, n=2)
    )
    (msg_id,) = {event.id for event in events}
    refused = service.post("/feedback", json.dumps({"msg_ids": [msg_id], "reward": 1}))
    assert (refused.status_code, "has 2 choices: rate each" in refused.json()["error"]["message"]) == (400, True)
    for choice in range(2):
        given = {"msg_ids": [msg_id], "reward": choice, "choice": choice}
        assert service.post("/feedback", json.dumps(given)).json()["matched"] == 1
    service.post("/commit", "")
    assert [(row.choice, row.reward) for row in service.store.settle(1)] == [(0, 0.0), (1, 1.0)]


LIMITED = "a request may have at most 8 (service.most_choices)"


@pytest.mark.parametrize(
    ("path", "changed", "param", "message"),
    [
        ("chat/completions", {"n": 1000}, "n", f"1000; {LIMITED}"),
        ("chat/completions", {"n": 9, "stream": True}, "n", f"9; {LIMITED}"),
        ("chat/completions", {"n": "9"}, "n", "'9' is no integer"),
        ("chat/completions", {"n": -8}, "n", "-8: expected at least 1"),
        ("chat/completions", {"n": 0}, "n", "0: expected at least 1"),
        ("chat/completions", {"metadata": {"task_id": "a\0"}}, None, "a text of the body contains NUL"),
        ("completions", {"prompt": "a\0"}, None, "a text of the body contains NUL"),
        ("chat/completions", {"user": "é" * 201}, "subject", "the subject has 201 characters, at most 200 are allowed"),
        ("completions", {"prompt": ["a"] * 9}, "prompt", f"9 prompts with n=1 are 9 choices; {LIMITED}"),
        ("completions", {"prompt": [[1], [2], [3]], "n": 3}, "prompt", "3 prompts with n=3 are 9 choices"),
        ("chat/completions", {"max_tokens": "999999"}, "max_tokens", "'999999' is no integer"),
        ("responses", {"input": "x", "max_output_tokens": [1]}, "max_output_tokens", "'[1]' is no integer"),
    ],
)
def test_the_choices_of_a_request_are_limited(service, path, changed, param, message) -> None:
    body = json.dumps({"model": "m", "messages": QUESTION, **changed})
    answer = service.post(f"/v1/{path}", body, authorization="Bearer dummy")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", None])
def test_an_answer_is_never_longer_than_the_configured_limit(service, field) -> None:
    given: dict[str, Any] = {} if field is None else {field: 100_000}
    for stream in (False, True):
        body = json.dumps({"model": "m", "messages": QUESTION, "stream": stream, "stream_options": None, **given})
        assert service.post("/v1/chat/completions", body).status_code == 200
    long = json.dumps({"model": "m", "input": "What is 12*7?", "max_output_tokens": 100_000})
    assert service.post("/v1/responses", long).status_code == 200
    for msg_id in [call.msg_id for call in stored(service)]:
        (call,) = service.store.calls([msg_id])
        assert len(call.model_call["response_ids"]) <= 8
    assert len(stored(service)) == 3


def stored(service: Service) -> list[Call]:
    """All recorded calls, once the writer has written them."""
    deadline = time.monotonic() + 20
    while service.store.counts()["recorded"] < service.gateway.counts().answered:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with Session(service.store._engine) as session:
        return list(session.scalars(select(Call)))


def test_answers_name_the_model_and_not_its_folder(service) -> None:
    client = service.client()
    for logprobs in (False, True):
        chat = client.chat.completions.create(
            model="m", messages=QUESTION, logprobs=logprobs, extra_body={"return_token_ids": logprobs}
        )
        assert chat.model == "shop/helper"
    stream = list(client.chat.completions.create(model="m", messages=QUESTION, stream=True))
    text = client.completions.create(model="m", prompt="12*7 =")
    response = client.responses.create(model="m", input="What is 12*7?")
    events = list(client.responses.create(model="m", input="What is 12*7?", stream=True))
    models = {text.model, response.model, *(chunk.model for chunk in stream)}
    assert models == {"shop/helper"}
    assert {event.response.model for event in events if hasattr(event, "response")} == {"shop/helper"}
    listed = httpx.get(f"{service.url}/v1/models", trust_env=False)
    assert [each["id"] for each in listed.json()["data"]] == ["shop/helper"]
    path = service.gateway.router.serving().status.model_path
    assert path not in listed.text + "".join(each.model_dump_json() for each in [text, response, *events, *stream])


def test_health_reports_the_engine_and_the_serving_version(service, monkeypatch) -> None:
    def health() -> dict[str, Any]:
        return dict(httpx.get(f"{service.url}/health", trust_env=False).json())

    version = service.gateway.router.serving().status.policy_version
    assert health() == {"status": "ok", "engine": "answers", "policy_version": version}
    monkeypatch.setattr(proxy, "_FRESH_S", -1.0)
    service.gateway.router.base = replace(service.gateway.router.serving(), base_url="http://127.0.0.1:9/v1")
    assert health() == {"status": "ok", "engine": "does not answer", "policy_version": version}
    service.gateway.router.base = None
    assert health() == {"status": "ok", "engine": "not started", "policy_version": None}


def test_a_feedback_id_with_another_body_is_a_conflict(service) -> None:
    ids = [service.client().chat.completions.create(model="m", messages=QUESTION).id for _ in range(2)]
    body = json.dumps({"msg_ids": ids[:1], "reward": 1, "feedback_id": "ticket-1", "metrics": {"helpful": 3}})
    assert service.post("/feedback", body).json()["matched"] == 1
    assert service.post("/feedback", body).json()["duplicate"] == 1
    other = service.post("/feedback", json.dumps({"msg_ids": ids[1:], "reward": 0, "feedback_id": "ticket-1"}))
    error = other.json()["error"]
    assert (other.status_code, error["code"], error["param"]) == (409, "feedback_id_reused", "feedback_id")
    assert [call.reward for call in service.store.calls(ids)] == [1.0, None]


def test_a_refused_report_can_be_corrected_under_its_id(service) -> None:
    answer = service.client().chat.completions.create(model="m", messages=QUESTION, n=2, max_tokens=2)
    body = {"msg_ids": [answer.id], "metric": "helpful", "value": 4, "reward": 1, "feedback_id": "ticket-1"}
    refused = service.post("/feedback", json.dumps(body))
    assert (refused.status_code, "has 2 choices" in refused.json()["error"]["message"]) == (400, True)
    assert service.post("/feedback", json.dumps({**body, "choice": 0})).json()["matched"] == 1
    assert [call.reward for call in service.store.calls([answer.id])] == [1.0, None]


@pytest.mark.parametrize("reward", [-0.1, 1.1, 1e6, 1e308, -1e308])
def test_a_reward_outside_0_to_1_is_refused_unless_other_bounds_are_declared(service, reward) -> None:
    answer = service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=3)
    for given in ({"reward": reward}, {"metrics": {"reward": reward}}, {"metric": "reward", "value": reward}):
        refused = service.post("/feedback", json.dumps({"msg_ids": [answer.id], **given}))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_metric", "reward")
        assert "outside 0.0 to 1.0 (service.metrics)" in error["message"]
    wide = DeclaredMetrics.of_service([Metric("reward", min=-1e308, max=1e308)])
    assert wide.numbers({"reward": reward, "other": 7.0}, names_answers=True) == {"reward": reward, "other": 7.0}
    with pytest.raises(MetricError, match="'other' is not declared"):
        DeclaredMetrics.of_service([Metric("helpful")]).numbers({"other": 7.0}, names_answers=True)


def test_the_bodies_of_the_java_client_are_accepted(service) -> None:
    body = {"model": "m", "messages": QUESTION, "stream": False, "max_tokens": 4}
    answer = service.post("/v1/chat/completions", json.dumps(body), authorization="Bearer dummy").json()
    feedback = f'{{"msg_ids":["{answer["id"]}"],"reward":0.8,"task_id":"task-5d8e","run_id":"0"}}'
    assert service.post("/feedback", feedback).json()["status"] == "success"
    commit = '{"task_id":null,"run_id":null,"time_threshold":null}'
    assert service.post("/commit", commit).json()["committed"] == 1
    assert service.post("/commit", commit).json()["committed"] == 0
    (row,) = service.store.settle(1)
    assert (row.task_id, row.run_id) == ("task-5d8e", "0")


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{}", '{"msg_ids": "a", "reward": 1}', '{"msg_ids": [], "reward": 1}', '{"msg_ids": ["a"]}',
        '{"msg_ids": ["a"], "reward": "x"}', '{"msg_ids": ["a"], "reward": NaN}', '{"msg_ids": ["a"], "reward": 1e999}',
        '{"msg_ids": [1], "reward": 1}', '{"msg_ids": ["a"], "reward": true, "tags": []}', '{"reward": 1}',
        '{"msg_ids": ["\\ud800"], "reward": []}', '{"msg_ids": ["a"], "metric": "implicit", "value": 1}',
        '{"msg_ids": ["a"], "reward": 1, "metrics": {"implicit": 1}}', '{"msg_ids": ["a"], "metric": "m"}',
        '{"msg_ids": ["a"], "metric": "implicit", "reward": 1}',
        '{"msg_ids": ["a"], "metric": "implicit", "comment": "x"}',
        '{"msg_ids": ["a"], "metric": "m", "metrics": {"n": 1}}',
        '{"msg_ids": ["a"], "value": 0, "reward": 1}', '{"msg_ids": ["a"], "reward": 1, "metrics": {"reward": 0}}',
    ],
)  # fmt: skip
def test_a_feedback_that_is_none_is_refused(service, body) -> None:
    answer = service.post("/feedback", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_reward_beside_another_metric_is_stored_too(service) -> None:
    answer = service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=3)
    given = {"msg_ids": [answer.id], "metric": "helpful", "value": 4, "reward": 0.5, "feedback_id": "f"}
    assert service.post("/feedback", json.dumps(given)).json()["matched"] == 1
    (call,) = service.store.calls([answer.id])
    assert call.reward == 0.5


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ({"metric": "helpful", "reward": 1}, {"helpful": 1}),
        ({"metric": "helpful", "reward": 1, "comment": "x"}, {"helpful": 1}),
        ({"metric": "helpful", "metrics": {"helpful": 3}}, {"helpful": 3}),
        ({"metric": "helpful", "metrics": {"helpful": 3}, "reward": 1}, {"helpful": 3, "reward": 1}),
        ({"metric": "helpful", "metrics": {"solved": 1}, "reward": 2}, {"helpful": 2, "solved": 1}),
        ({"metric": "helpful", "value": 2, "reward": 1}, {"helpful": 2, "reward": 1}),
        ({"metric": "helpful", "comment": "x"}, {}),
        ({"metric": "helpful", "user_feedback": {"rating": 4}}, {}),
    ],
)
def test_values_of_feedback_follow_from_value_and_metrics(said: dict[str, Any], values: dict[str, float]) -> None:
    assert FeedbackRequest(msg_ids=["a"], **said).values == values


def test_the_report_names_a_metric_without_values() -> None:
    said = r"value is missing.*'helpful', as value or in metrics, which has only 'solved'; leave metric out"
    with pytest.raises(ValidationError, match=said):
        FeedbackRequest(msg_ids=["a"], metric="helpful", metrics={"solved": 1})


def test_feedback_on_unknown_messages_is_not_found(service) -> None:
    answer = service.post("/feedback", '{"msg_ids": ["nothing"], "reward": 1}')
    assert (answer.status_code, answer.json()["status"], answer.json()["unknown"]) == (404, "unknown", ["nothing"])


def test_headers_name_run_and_subject_and_opt_out(service) -> None:
    chat = service.client().chat.completions
    for _ in range(2):
        chat.create(
            model="m", messages=QUESTION, max_tokens=3, user="ann", extra_headers={"x-rft-task": "t", "x-rft-run": "7"}
        )
    chat.create(model="m", messages=QUESTION, max_tokens=3, extra_headers={"x-rft-opt-out": "1"})
    rated = service.post("/feedback", '{"task_id": "t", "run_id": 7, "reward": 1, "comment": "good"}').json()
    assert rated["matched"] == 2
    service.post("/commit", "")
    rows = service.store.settle(1)
    assert {(row.task_id, row.run_id, row.subject) for row in rows} == {("t", "7", "ann")}
    metrics = httpx.get(service.url + "/metrics?format=json", trust_env=False).json()
    assert (metrics["requests_opted_out"], metrics["rows_committed"]) == (1, 2)


def test_the_rate_selects_runs_of_tasks_that_count_them_alike(policy_engine, tmp_path) -> None:
    service = Service(policy_engine, tmp_path, rate=0.5)
    try:
        for number in range(8):
            headers = {"x-rft-task": f"t{number}", "x-rft-run": "0"}
            service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=1, extra_headers=headers)
        chosen = SamplingRateStrategy.of(0.5)
        units = [SelectionContext(f"/run/t{number}/0") for number in range(8)]
        refused = sum(not chosen.should_select({}, {}, unit).accept for unit in units)
        counts = service.gateway.counts()
        assert (counts.answered, counts.not_selected) == (8, refused)
        assert 0 < refused < 8
    finally:
        service.close()


def test_keys_belong_to_tenants(policy_engine, tmp_path) -> None:
    service = Service(policy_engine, tmp_path, keys={"secret-a": "a", "secret-b": "b"})
    try:
        with pytest.raises(openai.AuthenticationError):
            service.client("wrong").chat.completions.create(model="m", messages=QUESTION)
        answer = service.client("secret-a").chat.completions.create(model="m", messages=QUESTION, max_tokens=3)
        body = json.dumps({"msg_ids": [answer.id], "reward": 1})
        assert service.post("/feedback", body).status_code == 401
        assert service.post("/feedback", body, authorization="Bearer secret-b").status_code == 404
        assert service.post("/feedback", body, authorization="Bearer secret-a").status_code == 200
    finally:
        service.close()


def test_a_database_that_cannot_be_written_fails_no_chat_request(policy_engine: PolicyEngine, tmp_path: Path) -> None:
    service = Service(policy_engine, tmp_path, most_waiting=3)
    try:
        with closing(sqlite3.connect(tmp_path / "traffic.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # another process's write lock
            chat = service.client().chat.completions
            answers = [chat.create(model="m", messages=QUESTION, max_tokens=2) for _ in range(5)]
            metrics = httpx.get(service.url + "/metrics?format=json", trust_env=False, timeout=10).json()
            other.execute("ROLLBACK")
        assert (metrics["requests_answered"], metrics["calls_recorded"], metrics["calls_dropped"]) == (5, 0, 2)
        assert metrics["rows_recorded"] == 0, "a scrape only reads, so it does not wait for the lock"
        rated = service.post(
            "/feedback", json.dumps({"msg_ids": [answer.id for answer in answers], "reward": 1})
        ).json()
        assert (rated["matched"], rated["unknown"]) == (3, [answer.id for answer in answers[3:]])
    finally:
        service.close()


def test_a_foreign_page_is_refused(service) -> None:
    answer = service.post("/commit", "{}", origin="http://evil.example")
    assert answer.status_code == 403
    assert service.post("/v1/chat/completions", "{}", host="evil.example").status_code in (403, 421)


@pytest.mark.parametrize(
    ("body", "named", "message"),
    [
        ({"metric": "charm", "value": 1}, "charm", "not declared: expected one of helpful, reward, solved"),
        ({"reward": 1, "metrics": {"charm": 1}}, "charm", "not declared"),
        ({"metric": "helpful", "value": 6}, "helpful", "6.0 is outside 1 to 5"),
        ({"reward": 1, "metrics": {"solved": 0.5}}, "solved", "0.5 is no boolean"),
        ({"reward": 2}, "reward", "2.0 is above 1"),
    ],
)
def test_a_metric_that_is_not_declared_or_out_of_range_is_refused_by_name(
    policy_engine, tmp_path, body, named, message
) -> None:
    declared = [Metric("reward", max=1), Metric("helpful", "call", min=1, max=5), Metric("solved", type="boolean")]
    service = Service(policy_engine, tmp_path, metrics=DeclaredMetrics(declared))
    try:
        answer = service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=3)
        refused = service.post("/feedback", json.dumps({"msg_ids": [answer.id], **body}))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_metric", named)
        assert message in error["message"]
        run = {"conversation_id": "c", "metric": "helpful", "value": 3}
        assert "name the answers" in service.post("/feedback", json.dumps(run)).json()["error"]["message"]
        good = {"msg_ids": [answer.id], "reward": 1, "metrics": {"helpful": 5, "solved": 1}}
        assert service.post("/feedback", json.dumps(good)).json()["matched"] == 1
    finally:
        service.close()
