"""Requests whose engine is lost: repeated at the engine that is found again, and once only if it dies of them."""

from pathlib import Path
from typing import Any

import pytest

from chaos.online import echo_engine
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.httpx_compat import wire
from rft_platform.serving import gateway as gateway_module
from rft_platform.serving.database import open_database
from rft_platform.serving.gateway import ServedEngine, TrafficApp
from rft_platform.serving.selection import Selection
from rft_platform.serving.traffic import TrafficStore
from rft_platform.serving.writer import TrafficWriter


class Failing:
    """Clients of an engine whose first answers are errors."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.asked = 0

    def async_transport(self, history: Any, connections: Any) -> "Failing":
        return self

    async def handle_async_request(self, request: Any) -> Any:
        self.asked += 1
        if self._errors:
            raise self._errors.pop(0)
        return wire.Response(200)


async def ask(folder: Path, clients: Any) -> Any:
    engine = ServedEngine(echo_engine.status(), clients, "http://127.0.0.1:1/v1")
    writer = TrafficWriter(TrafficStore(open_database(f"sqlite:///{folder / 'traffic.db'}")))
    app = TrafficApp(lambda: engine, writer, Selection([]), SamplingParams(max_tokens=4))
    try:
        request = wire.Request("POST", "http://127.0.0.1:1/v1/chat/completions", content=b"{}")
        return await app.send(app.find_run({}), request)
    finally:
        writer.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_RETRY_S", 0.0)


async def test_a_request_survives_an_engine_that_is_killed_and_started_again(tmp_path) -> None:
    refused = [wire.ConnectError("refused") for _ in range(3)]
    clients = Failing(wire.ReadError("reset"), *refused)
    assert (await ask(tmp_path, clients)).status_code == 200
    assert clients.asked == 5


async def test_a_request_that_kills_engines_is_repeated_once(tmp_path) -> None:
    clients = Failing(*[wire.RemoteProtocolError("closed") for _ in range(5)])
    with pytest.raises(wire.RemoteProtocolError):
        await ask(tmp_path, clients)
    assert clients.asked == 2
