"""The trainer's command server over real connections: one command at a time, status and cancel at any time."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from rft_platform.cluster.local.service_process import ServiceProcess
from rft_platform.common.errors import NonFiniteError, TrainerError, UserError
from rft_platform.inference.serving import http_server
from rft_platform.training.protocol import PREFIX, Message, error_message, raise_error
from rft_platform.training.service.command_server import CommandServer

SERVICE = ServiceProcess("trainer", Path("trainer.json"), token="secret")


@pytest.fixture
def server() -> Iterator[CommandServer]:
    server = CommandServer(SERVICE, lambda: {"pid": 1})
    yield server
    server.close()


class Caller(threading.Thread):
    """A caller that collects the events of one command."""

    def __init__(self, server: CommandServer, command: str) -> None:
        super().__init__(daemon=True)
        self.server, self.command = server, command
        self.events: list[Message] = []
        self.accepted = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", url(self.server, self.command), headers=HEADERS, timeout=10) as response:
            for line in response.iter_lines():
                self.events.append(json.loads(line))
                self.accepted.set()

    def kinds(self) -> list[str]:
        """The events after the end of the command."""
        self.join(10)
        return [event["event"] for event in self.events]


HEADERS = {"Authorization": "Bearer secret"}


def url(server: CommandServer, command: str) -> str:
    return f"http://127.0.0.1:{server.port}{PREFIX}{command}"


def ask(server: CommandServer, command: str, token: str = "secret", content: bytes = b"{}") -> httpx.Response:
    return httpx.post(url(server, command), content=content, headers={"Authorization": f"Bearer {token}"}, timeout=10)


def open_socket(server: CommandServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


def test_a_wrong_token_is_refused(server: CommandServer) -> None:
    for command in ("status", "cancel", "train", "score", "shutdown"):
        response = ask(server, command, token="guess")
        assert response.status_code == 401 and "bearer token of the lease" in response.text
        assert "secret" not in response.text


def test_a_web_page_is_refused_even_with_the_token(server: CommandServer) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert httpx.post(url(server, "status"), json={}, headers=HEADERS | headers).status_code == 403


@pytest.mark.parametrize("start", [b"x" * 1000, b"POST /trainer/train HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"\xff\xfe\n"])
def test_bytes_without_the_token_are_not_kept(server: CommandServer, start: bytes) -> None:
    before = rss_mb()
    if start.startswith(b"POST"):
        start += b"Authorization: Bearer guess\r\nContent-Length: 1073741824\r\n\r\n"
    with open_socket(server) as caller, suppress(ConnectionError):
        caller.sendall(start)
        for _ in range(200):
            caller.sendall(b"x" * 2**20)  # refused at once, not after 200 MB
        pytest.fail("the server read 200 MB of a caller without the token")
    assert rss_mb() - before < 50
    assert ask(server, "status").status_code == 200


def test_a_caller_that_sends_no_request_is_dropped(server: CommandServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADERS_TIMEOUT_S", 0.5)
    callers = [open_socket(server) for _ in range(20)]
    start = time.monotonic()
    for caller in callers:
        with suppress(ConnectionError):
            caller.sendall(b"P")
            assert caller.recv(1) == b""
        caller.close()
    assert time.monotonic() - start < 5
    assert ask(server, "status").status_code == 200


@pytest.mark.parametrize("body", [b"[1]", b"[" * 100_000, b"5", b"no JSON"])
def test_a_body_that_is_no_object_is_refused(server: CommandServer, body: bytes) -> None:
    response = ask(server, "train", content=body)
    assert response.status_code == 400 and "must be a JSON object" in response.text
    assert ask(server, "status").status_code == 200


def test_an_unknown_command_is_an_error(server: CommandServer) -> None:
    assert ask(server, "dance").status_code == 404


def test_jobs_wait_and_can_be_watched_and_cancelled(server: CommandServer) -> None:
    first = Caller(server, "train")
    assert first.accepted.wait(10)
    second = Caller(server, "train")
    job = server.next_job()
    assert job is not None and job.command == {"command": "train"}
    assert ask(server, "status").json() == {"pid": 1, "busy": True}
    assert not server.cancelled.is_set()
    assert ask(server, "cancel").json() == {"cancelled": True}
    assert server.cancelled.is_set()
    job.send({"event": "step"})
    server.finish(job, {"event": "done"})
    assert ask(server, "cancel").json() == {"cancelled": False}
    follower = server.next_job()
    assert follower is not None
    assert not server.cancelled.is_set()  # the cancellation was for the first alone
    server.finish(follower, {"event": "error"})
    assert first.kinds() == ["accepted", "step", "done"]
    assert second.kinds() == ["accepted", "error"]


def test_a_caller_that_disconnects_does_not_stop_the_job(server: CommandServer) -> None:
    with httpx.stream("POST", url(server, "train"), headers=HEADERS) as response:
        next(response.iter_lines())
        job = server.next_job()
    assert job is not None
    for _ in range(100):
        job.send({"event": "step"})
    server.finish(job, {"event": "done"})
    assert ask(server, "status").json()["busy"] is False


def test_a_caller_that_reads_late_gets_every_event(server: CommandServer) -> None:
    """As a driver that was stopped for a while."""
    metrics = {"x" * 1000: 0.0}
    with httpx.stream("POST", url(server, "train"), headers=HEADERS, timeout=10) as response:
        job = server.next_job()
        assert job is not None
        for _ in range(20_000):  # more than the buffers of both sockets hold
            job.send({"event": "step", "metrics": metrics})
        server.finish(job, {"event": "done"})
        time.sleep(0.2)
        assert ask(server, "status").json()["busy"] is False
        kinds = [json.loads(line)["event"] for line in response.iter_lines()]
    assert kinds.count("step") == 20_000 and kinds[-1] == "done"


def test_no_command_is_accepted_after_the_time_out() -> None:
    with closing(CommandServer(replace(SERVICE, idle_timeout_s=0.01), dict)) as server:
        assert server.next_job() is None
        response = ask(server, "train")
        assert response.status_code == 503 and "takes no more commands" in response.text


@pytest.mark.slow
def test_a_command_that_runs_longer_than_the_time_out_is_no_idle_time() -> None:
    with closing(CommandServer(replace(SERVICE, idle_timeout_s=2.0), dict)) as server:
        first = Caller(server, "train")
        job = server.next_job()
        assert job is not None
        time.sleep(2.5)
        second = Caller(server, "train")
        assert second.accepted.wait(10)
        server.finish(job, {"event": "done"})
        follower = server.next_job()
        assert follower is not None
        server.finish(follower, {"event": "done"})
        assert first.kinds()[-1] == second.kinds()[-1] == "done"
        assert server.next_job() is None


def test_the_last_event_arrives_although_the_server_closes(server: CommandServer) -> None:
    caller = Caller(server, "shutdown")
    job = server.next_job()
    assert job is not None
    server.finish(job, {"event": "done"})
    server.close()
    assert caller.kinds() == ["accepted", "done"]


def test_errors_keep_their_kind_over_the_wire() -> None:
    for error in (UserError("no file"), NonFiniteError("row r1"), TrainerError("gone")):
        with pytest.raises(type(error), match=str(error)):
            raise_error(error_message(error))
