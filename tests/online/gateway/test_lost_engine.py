"""Requests whose engine is lost: repeated at the engine that is found again, and once only if it dies of them."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from chaos.online import echo_engine
from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import SamplingParams
from rft_platform.online.gateway import proxy
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.proxy import TrafficApp
from rft_platform.online.releases.routing import ServedEngine
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.selection import Selection
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.rollout.recording.httpx_compat import wire


class Failing:
    """Clients of an engine whose first answers are errors."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.asked = 0
        self.hosts: list[str] = []

    def async_transport(self, history: Any, connections: Any) -> "Failing":
        return self

    async def handle_async_request(self, request: Any) -> Any:
        self.asked += 1
        self.hosts.append(request.headers["host"])
        if self._errors:
            raise self._errors.pop(0)
        return wire.Response(200)


async def ask(folder: Path, clients: Any, engine_url: str = "http://127.0.0.1:1/v1") -> Any:
    engine = ServedEngine(echo_engine.status(), clients, engine_url)
    writer = TrafficWriter(TrafficStore(open_database(f"sqlite:///{folder / 'traffic.db'}")))
    app = TrafficApp(lambda: engine, writer, Selection([]), SamplingParams(max_tokens=4))
    try:
        request = wire.Request("POST", "http://127.0.0.1:1/v1/chat/completions", content=b"{}")
        return await app.send(app.find_run({}), request)
    finally:
        writer.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_RETRY_S", 0.0)


async def test_a_request_survives_an_engine_that_is_killed_and_started_again(tmp_path) -> None:
    refused = [wire.ConnectError("refused") for _ in range(3)]
    clients = Failing(wire.ReadError("reset"), *refused)
    assert (await ask(tmp_path, clients)).status_code == 200
    assert clients.asked == 5


async def test_an_engine_receives_requests_under_its_own_host_name(tmp_path) -> None:
    await ask(tmp_path, clients := Failing(), "https://engine.example.com:8443/v1")
    assert clients.hosts == ["engine.example.com:8443"]


async def test_a_request_that_kills_engines_is_repeated_once(tmp_path) -> None:
    clients = Failing(*[wire.RemoteProtocolError("closed") for _ in range(5)])
    with pytest.raises(wire.RemoteProtocolError):
        await ask(tmp_path, clients)
    assert clients.asked == 2


async def test_a_service_without_its_engine_takes_feedback_and_names_the_reason(tmp_path) -> None:
    def fail() -> ServedEngine:
        raise EngineError("out of memory")

    writer = TrafficWriter(TrafficStore(open_database(f"sqlite:///{tmp_path / 'traffic.db'}")))
    started = partial(TrafficApp, fail, writer, Selection([]), SamplingParams(max_tokens=4))
    with pytest.raises(EngineError, match="out of memory"):
        started()
    gateway = started(engine_needed=False)
    app = build_app(gateway, writer, TrafficReader(), CommitRule())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:1") as client:
        refused = await client.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert (await client.post("/commit")).status_code == 200
        assert (await client.post("/feedback", json={"msg_ids": ["m1"], "reward": 1})).status_code == 404
        for given, said in (
            ({}, "msg_ids is missing: expected the ids"),
            ({"msg_id": "m1", "conversation_id": "c"}, "unknown key msg_id: did you mean msg_ids?"),
        ):
            answer = await client.post("/feedback", json={"reward": 1, **given})
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(said)
        gateway.router.base = ServedEngine(echo_engine.status(), cast(Any, Failing()), "http://127.0.0.1:1/v1")
        assert gateway.find_run({}).route.engine is gateway.router.base
    writer.close()
