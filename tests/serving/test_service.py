"""The service over HTTP, before a real engine: OpenAI clients, feedback, commits, and what existing clients send."""

import json
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from pydantic import ValidationError

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.inference.serving.http_server import server_config
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.serving.app import CommitRule, build_app
from rft_platform.serving.database import open_database
from rft_platform.serving.gateway import ServedEngine, TrafficApp
from rft_platform.serving.request_bodies import FeedbackRequest
from rft_platform.serving.rules.declared_metrics import DeclaredMetrics, Metric
from rft_platform.serving.rules.rate_limits import RateLimits
from rft_platform.serving.selection import SamplingRateStrategy, Selection
from rft_platform.serving.traffic import TrafficStore
from rft_platform.serving.writer import TrafficWriter

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
        )
        self.limits = limits
        app = build_app(self.gateway, writer, CommitRule(), dict, limits=limits, metrics=metrics)
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
    assert service.post("/feedback", json.dumps({"msg_ids": [msg_id], "reward": 1})).json()["matched"] == 1
    service.post("/commit", "")
    assert [row.choice for row in service.store.settle(1)] == [0, 1]


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
def test_a_metric_without_a_value_of_its_own(said: dict[str, Any], values: dict[str, float]) -> None:
    assert FeedbackRequest(msg_ids=["a"], **said).values == values


def test_a_metric_that_has_no_value_anywhere_is_named() -> None:
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
        assert "rows_recorded" not in metrics, "the database does not answer"
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
