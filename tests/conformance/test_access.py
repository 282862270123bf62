"""Who may call an engine: its key, its Host, no other origin; and what a caller who may not call costs it."""

import socket
import time
from typing import Any

import httpx
import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.serving import http_server

from .conftest import bearer

QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 1}


def root(engine: EngineClient) -> str:
    return engine.base_url.removesuffix("/v1")


def ask(engine: EngineClient, **headers: str) -> httpx.Response:
    return httpx.post(f"{engine.base_url}/chat/completions", json=QUESTION, headers=headers, trust_env=False)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer EMPTY"}, {"Authorization": "Basic eDp5"}])
def test_model_calls_need_the_key(engine: EngineClient, headers: dict[str, str]) -> None:
    answer = ask(engine, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "api_key" in answer.json()["error"]["message"]
    assert ask(engine, **bearer(engine)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/docs", "/version", "/v1/embeddings"])
def test_only_health_is_open(engine: EngineClient, path: str) -> None:
    assert httpx.get(root(engine) + path, trust_env=False).status_code == 401
    assert httpx.get(root(engine) + "/health", trust_env=False).status_code == 200


def test_the_key_does_not_open_the_control_plane(engine: EngineClient) -> None:
    answer = httpx.post(f"{root(engine)}/engine/status", json={}, headers=bearer(engine), trust_env=False)
    assert answer.status_code == 401 and "lease" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_web_pages_are_refused_even_with_the_key(engine: EngineClient, headers: dict[str, str]) -> None:
    answer = ask(engine, **bearer(engine), **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in answer.headers


def test_a_body_that_is_too_large_is_refused_and_the_connection_stays(engine: EngineClient) -> None:
    with httpx.Client(headers=bearer(engine), trust_env=False, timeout=60) as http:
        large = {"messages": [{"role": "user", "content": "x" * (33 << 20)}]}
        answer = http.post(f"{engine.base_url}/chat/completions", json=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert http.post(f"{engine.base_url}/chat/completions", json=QUESTION).status_code == 200


def test_a_stranger_s_body_is_not_read(engine: EngineClient) -> None:
    with socket.create_connection(
        ("127.0.0.1", int(engine.base_url.split(":")[2].split("/")[0])), timeout=10
    ) as caller:
        caller.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 200 << 20:
                sent += caller.send(b"x" * 65536)
    assert sent < 32 << 20


@pytest.mark.slow
def test_half_open_requests_are_dropped() -> None:
    """In this process, with short limits: the engines' are longer."""
    import asyncio

    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> list[float]:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        server = uvicorn.Server(http_server.server_config(app, 1, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve([listener]))
        closed = []
        whole = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        starts = [b"", b"GET / HT", whole + b"GET", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx"]
        for start in starts:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(start)
            begun = time.monotonic()
            while time.monotonic() - begun < 10:  # a byte now and then does not keep it open
                try:
                    if start and b"9" not in start:
                        writer.write(b"X")
                    data = await asyncio.wait_for(reader.read(1000), 0.1)
                except TimeoutError:
                    continue
                except ConnectionError:
                    data = b""
                if not data:
                    break
            closed.append(time.monotonic() - begun)
            writer.close()
        reader, writer = await asyncio.open_connection(*address)  # one that behaves is kept
        for _ in range(3):
            writer.write(whole)
            assert b"200 OK" in await asyncio.wait_for(reader.read(1000), 5)
            await asyncio.sleep(0.6)
        writer.close()
        server.should_exit = True
        await serving
        return closed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "HEADERS_TIMEOUT_S", 0.5)
        patch.setattr(http_server, "BODY_TIMEOUT_S", 0.5)
        closed = asyncio.run(scenario())
    assert all(seconds < 5 for seconds in closed)
