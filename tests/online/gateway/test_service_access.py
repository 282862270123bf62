"""Who may send what to the service: keys before bodies, limited bodies, and text that every database can store."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.inference.serving.http_server import server_config
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.limits import RateLimits
from rft_platform.online.gateway.proxy import GatewayCounts
from rft_platform.online.gateway.release_routes import release_routes
from rft_platform.online.releases.commands import ReleaseCommands, ServableVersion
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.traffic.database import Feedback, open_database
from rft_platform.online.traffic.incoming import NewCall
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api.errors import ApiError
from rft_platform.servers.ui_servers import online_server
from rft_platform.web_guard.checks import bearer_token

KEY = {"authorization": "Bearer secret"}
MIB = 1 << 20


class Guarded:
    """A service that needs a key, without an engine; requests reach it in this process."""

    def __init__(self, folder: Path) -> None:
        engine = open_database(f"sqlite:///{folder / 'traffic.db'}")
        self.store, self.received = TrafficStore(engine), 0
        self.store.record([NewCall("m1", 0, {}, 1, 5, 0.0)])
        self.writer = TrafficWriter(self.store)
        gateway: Any = SimpleNamespace(
            tenant_of=self._tenant, aclose=self._closed, counts=lambda _: GatewayCounts(), engine_health=self._health
        )
        versions = [ServableVersion(number, number, None, number == 0, {}) for number in range(2)]
        self.releases = ReleaseCommands(ReleaseStore(engine), lambda: versions)
        reader = TrafficReader()
        routes = [release_routes(self.releases, self.writer, reader, self._tenant)]
        self.limits = RateLimits(requests_per_minute=5)
        self.app = build_app(gateway, self.writer, reader, CommitRule(), routes=routes, limits=self.limits)

    @staticmethod
    def _tenant(headers: Any) -> str:
        if bearer_token(headers) != "secret":
            raise ApiError(401, "a key is needed", "invalid_api_key")
        return ""

    @staticmethod
    async def _closed() -> None: ...

    @staticmethod
    async def _health() -> dict[str, Any]:
        return {}

    async def ask(self, method: str, path: str, content: Any = None, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            given = {"content-type": "application/json", **headers}
            return await client.request(method, path, content=content, headers=given)

    async def parts(self, number: int) -> Any:
        """A body of this many MiB, which counts what is read of it."""
        for _ in range(number):
            self.received += 1
            yield b" " * MIB


@pytest.fixture
def guarded(tmp_path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.writer.close()


@pytest.mark.parametrize("path", ["/feedback", "/commit", "/releases/promote", "/nothing"])
async def test_the_key_is_checked_before_the_body_is_read(guarded, path) -> None:
    answer = await guarded.ask("POST", path, guarded.parts(64))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert guarded.received <= 2


@pytest.mark.parametrize("path", ["/feedback", "/commit", "/releases/promote"])
async def test_long_bodies_are_refused(guarded, path) -> None:
    answer = await guarded.ask("POST", path, guarded.parts(5), **KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_only_health_is_public(guarded) -> None:
    assert (await guarded.ask("GET", "/health")).status_code == 200
    for path in ("/metrics", "/openapi.json", "/docs", "/redoc", "/releases"):
        assert (await guarded.ask("GET", path)).status_code == 401, path
    assert "rft_online_rows_recorded 1" in (await guarded.ask("GET", "/metrics", **KEY)).text
    for path in ("/docs", "/redoc"):
        assert (await guarded.ask("GET", path, **KEY)).status_code == 404, "they load scripts from elsewhere"


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("/feedback", {"comment": "a\0b"}), ("/feedback", {"metric": "\0"}), ("/feedback", {"metric": "m" * 101}),
        ("/feedback", {"tags": {"a": ["\0"]}}),
        ("/feedback", {"tags": {"a": float("nan")}}), ("/feedback", {"user_feedback": {"rating": float("inf")}}),
        ("/feedback", {"reward": "nan"}), ("/feedback", {"msg_ids": ["m\0"]}),
        ("/feedback", {"choice": -1}), ("/feedback", {"choice": 2**31}), ("/commit", {"task_id": "\0"}),
        ("/commit", {"time_threshold": 2**53}), ("/releases/promote", {"reason": "\0"}),
    ],
)  # fmt: skip
async def test_what_a_database_cannot_store_is_refused(guarded, path, changed) -> None:
    base = {"msg_ids": ["m1"], "reward": 1} if path == "/feedback" else {}
    answer = await guarded.ask("POST", path, json.dumps(base | changed), **KEY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_database_that_does_not_work_is_unavailable(guarded) -> None:
    def broken(**_: Any) -> None:
        raise OperationalError("select", {}, Exception("the server closed the connection"))

    guarded.store.commit = broken
    answer = await guarded.ask("POST", "/commit", "{}", **KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")


async def test_reports_do_not_wait_for_the_thread_that_writes(guarded) -> None:
    release = guarded.releases.canary(1)
    blocked = threading.Event()
    writing = asyncio.create_task(guarded.writer.run(lambda _: blocked.wait(20)))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        assert "rft_online_rows_recorded 1" in (await guarded.ask("GET", "/metrics", **KEY)).text
        assert (await guarded.ask("GET", "/releases", **KEY)).json()["serving"] == 0
        assert (await guarded.ask("GET", "/releases/report", **KEY)).json()["number"] == release.number
    assert not writing.done()
    blocked.set()
    await writing


@pytest.mark.parametrize(("depth", "status"), [(150, 200), (199, 200), (200, 400), (300, 400), (100_000, 400)])
async def test_deeply_nested_tags_are_stored_or_refused(guarded, depth, status) -> None:
    tags = '{"a":' * depth + "1" + "}" * depth
    answer = await guarded.ask("POST", "/feedback", f'{{"msg_ids": ["m1"], "reward": 1, "tags": {tags}}}', **KEY)
    assert answer.status_code == status, answer.text


async def test_a_body_with_too_many_values_is_refused(guarded) -> None:
    many = '{"msg_ids": ["m1"], "reward": 1, "tags": {"a": [' + "[]," * 1_000_000 + "[]]}}"
    answer = await guarded.ask("POST", "/feedback", many, **KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    text = json.dumps({"msg_ids": ["m1"], "reward": 1, "comment": '\\",' * 24_000})
    assert (await guarded.ask("POST", "/feedback", text, **KEY)).status_code == 200


def values(guarded: Guarded) -> dict[str, tuple[str, float | None, str | None]]:
    """The stored feedback by its id."""
    with Session(guarded.store._engine) as session:
        return {each.feedback_id: (each.metric, each.value, each.comment) for each in session.scalars(select(Feedback))}


async def test_each_metric_is_stored_once(guarded) -> None:
    only = {"msg_ids": ["m1"], "feedback_id": "f1", "comment": "fine", "metrics": {"helpful": 4, "solved": 1}}
    long = {"msg_ids": ["m1"], "feedback_id": "f" * 200, "reward": 0.5, "metrics": {"helpful": 3, "reward": 0.5}}
    for matched in (1, 0):
        for body in (only, long):
            answer = await guarded.ask("POST", "/feedback", json.dumps(body), **KEY)
            assert (answer.status_code, answer.json()["matched"]) == (200, matched)
    found = values(guarded)
    (digest,) = found.keys() - {"f1", "f1:solved", "f" * 200}
    assert len(digest) <= 200
    assert found == {
        "f1": ("helpful", 4.0, "fine"), "f1:solved": ("solved", 1.0, None),
        "f" * 200: ("reward", 0.5, None), digest: ("helpful", 3.0, None),
    }  # fmt: skip
    assert [call.reward for call in guarded.store.calls(["m1"])] == [0.5]


async def test_ids_of_implicit_feedback_are_reserved(guarded) -> None:
    body = {"msg_ids": ["m1"], "reward": 1, "feedback_id": "implicit-m1-0"}
    answer = await guarded.ask("POST", "/feedback", json.dumps(body), **KEY)
    assert (answer.status_code, "reserved" in answer.json()["error"]["message"]) == (400, True)


async def test_a_redaction_that_fails_is_an_error_of_the_users_code(guarded) -> None:
    guarded.store._redaction = Redaction(lambda text: None)
    given = {"msg_ids": ["m1"], "reward": 1, "comment": "late"}
    answer = await guarded.ask("POST", "/feedback", json.dumps(given), **KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "user_code_failed")


async def test_a_foreign_page_does_not_use_up_the_rate_of_a_tenant(guarded) -> None:
    for _ in range(3):
        for refused in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            answer = await guarded.ask("POST", "/v1/chat/completions", "{}", **KEY, **refused)
            assert answer.status_code in (403, 421)
    assert guarded.limits.refused.total() == 0


def test_a_service_on_all_addresses_becomes_ready(guarded, tmp_path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        explorer = SimpleNamespace(listen_address="0.0.0.0", proxy_port=listener.getsockname()[1])
        project: Any = SimpleNamespace(config=SimpleNamespace(explorer=explorer))
        server = uvicorn.Server(server_config(guarded.app, 1, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            service = online_server(Home(tmp_path), project, 3000)
            declared = service.service
            assert declared is not None and declared.is_ready is not None and declared.is_ready()
            assert service.pages["status"] == f"http://0.0.0.0:{explorer.proxy_port}/status"
        finally:
            server.should_exit = True
            thread.join(20)
