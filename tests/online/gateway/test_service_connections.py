"""Slow, endless and many connections, at a real server with real sockets: other callers are still answered."""

import itertools
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from chaos.online import echo_service
from rft_platform.inference.serving import api_guard
from rft_platform.inference.serving.http_server import ConnectionLimits, server_config
from tests.online.gateway.test_service_access import Guarded
from tests.support.ports import free_port

BODY_S = 0.6
MOST = 40
KEY = "authorization: Bearer secret\r\n"


class Served:
    """The service of ``Guarded`` behind a socket."""

    def __init__(self, folder: Path) -> None:
        self.guarded = Guarded(folder)
        self.guarded.limits._requests = None  # no limit of requests
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listener.getsockname()
        config = server_config(self.guarded.app, 1, limits=ConnectionLimits(BODY_S, MOST), log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def open(self, text: str) -> socket.socket:
        """A connection that has sent ``text``."""
        made = socket.create_connection(self.address, timeout=10)
        made.sendall(text.encode())
        return made

    def rate(self) -> int:
        """The status of a feedback on a known answer."""
        body = {"msg_ids": ["m1"], "reward": 1}
        url = f"http://127.0.0.1:{self.address[1]}/feedback"
        headers = {"authorization": "Bearer secret"}
        return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=10).status_code

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


def head(path: str = "/feedback", key: str = KEY, length: str = "content-length: 1000") -> str:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{key}{length}\r\n\r\n"


def read_to_end(connection: socket.socket, drip: str = "") -> tuple[bytes, float]:
    """Everything that the server sends until it closes the connection, and the seconds until then.

    ``drip`` is sent every tenth of a second meanwhile.
    """
    begun, received = time.monotonic(), b""
    connection.settimeout(0.1)
    while time.monotonic() - begun < 10:
        try:
            if drip:
                connection.sendall(drip.encode())
            data = connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            data = b""
        if not data:
            return received, time.monotonic() - begun
        received += data
    raise AssertionError("the connection stays open")


@pytest.mark.parametrize("path", ["/feedback", "/commit", "/v1/chat/completions", "/releases/promote"])
def test_a_caller_without_a_key_is_answered_before_it_sends_its_body(served: Served, path: str) -> None:
    with served.open(head(path, key="") + "x") as connection:
        begun = time.monotonic()
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        assert time.monotonic() - begun < 0.5
        assert read_to_end(connection, drip="x")[1] < BODY_S + 0.5


def test_a_caller_without_a_key_that_sends_its_body_later_still_reads_the_answer(served: Served) -> None:
    with served.open(head(key="", length=f"content-length: {1 << 19}")) as connection:
        connection.sendall(b"x" * (1 << 19))
        text, seconds = read_to_end(connection)
        assert b"401" in text[:20] and text.endswith(b"}") and seconds < 1


@pytest.mark.parametrize("path", ["/feedback", "/commit"])
def test_the_body_of_a_caller_with_a_key_must_arrive_in_time(served: Served, path: str) -> None:
    with served.open(head(path)) as connection:
        text, seconds = read_to_end(connection, drip="x")
    assert (text, BODY_S - 0.2 < seconds < BODY_S + 1) == (b"", True)


def test_a_chunked_body_without_an_end_is_cut(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.open(head(length="transfer-encoding: chunked")) as connection:
        text, seconds = read_to_end(connection, drip="1\r\nx\r\n")
        assert (text, seconds < BODY_S + 1) == (b"", True)
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    monkeypatch.setattr(served._server.config, "limits", ConnectionLimits(60.0))
    with served.open(head(length="transfer-encoding: chunked")) as connection:
        sent = 0
        try:
            while sent < 1 << 30:
                sent += connection.send(chunk)
        except OSError:
            pass
    assert sent < 1 << 28, "it ends before its time"
    assert served.rate() == 200


def test_a_slow_body_behind_another_request_is_cut(served: Served) -> None:
    first = '{"msg_ids": ["m1"], "reward": 1}'
    with served.open(head(length=f"content-length: {len(first)}") + first + head() + "x") as connection:
        text, seconds = read_to_end(connection, drip="x")
    assert text.startswith(b"HTTP/1.1 200") and text.count(b"HTTP/1.1") == 1
    assert seconds < BODY_S + 1


def test_the_time_limit_of_a_body_does_not_close_idle_connections(served: Served) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with served.open("") as connection:
        for pause_s in (BODY_S + 0.4, BODY_S + 0.4, 0.0):
            connection.sendall(request)
            answer = connection.recv(4096)
            while not answer.endswith(b"}"):  # head and body may arrive in two pieces
                piece = connection.recv(4096)
                assert piece, "the server closed the connection"
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause_s)


@pytest.mark.parametrize(
    "text",
    [
        "", "POST /feed", head(key="") + "x", head() + "x", head("/v1/chat/completions") + "x",
        "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)  # fmt: skip
def test_idle_connections_do_not_block_other_clients(
    served: Served, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_guard, "_LINGER_S", 60.0)
    with ExitStack() as stack:
        for _ in range(4 * MOST):
            stack.enter_context(served.open(text))
            time.sleep(0.003)  # if too many wait to be accepted, the kernel lets the next one wait for a second
        assert [served.rate() for _ in range(3)] == [200] * 3
        assert len(served._server.server_state.connections) <= MOST


def test_the_number_of_connections_follows_from_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    given, raised = (1024, 4096), []
    monkeypatch.setattr(resource, "getrlimit", lambda _: given)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert ConnectionLimits.within_open_files(30.0, 400) == ConnectionLimits(30.0, 400)
    assert raised == []
    assert ConnectionLimits.within_open_files(30.0, 1000) == ConnectionLimits(30.0, 1000)
    assert ConnectionLimits.within_open_files(30.0, 10_000) == ConnectionLimits(30.0, 1984)
    given = (1024, resource.RLIM_INFINITY)
    assert ConnectionLimits.within_open_files(30.0, 10_000) == ConnectionLimits(30.0, 10_000)
    assert raised == [(2128, 4096), (4096, 4096), (20_128, resource.RLIM_INFINITY)]


@contextmanager
def echoing(folder: Path, files: int) -> Iterator[str]:
    """A service before an echo engine, in processes of their own; the service may open ``files`` files."""
    port, engine_port = free_port(), free_port()
    database = f"sqlite:///{folder / 'traffic.db'}"
    commands = [
        [sys.executable, "-m", "chaos.online.echo_engine", str(engine_port)],
        [sys.executable, "-m", "chaos.online.echo_service", *echo_service.arguments(port, database, engine_port)],
    ]
    processes = [
        subprocess.Popen(commands[0], cwd=Path(__file__).parents[3]),
        subprocess.Popen(
            commands[1],
            cwd=Path(__file__).parents[3],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        ),
    ]
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["engine"] == "answers":
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)


@pytest.mark.slow
def test_a_service_with_few_open_files_answers_while_slow_bodies_keep_arriving(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with echoing(tmp_path, files=200) as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for count in itertools.count(1):
            made = stack.enter_context(socket.create_connection(address, timeout=10))
            made.sendall((head("/v1/chat/completions", key="") + "x").encode())
            if count % 65 == 0:
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=10)
                assert answer.status_code == 200, answer.text
            if count == 260:
                break
        rated = {"msg_ids": [json.loads(answer.text)["id"]], "reward": 1}
        assert httpx.post(f"{url}/feedback", json=rated, trust_env=False, timeout=10).json()["matched"] == 1
