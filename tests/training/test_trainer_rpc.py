"""Commands over a real socket: one at a time, with the token only; looking in and cancelling at any time."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from rft_platform.common.errors import NonFiniteError, TrainerError, UserError
from rft_platform.training.protocol import Message, error_message, raise_error
from rft_platform.training.service import rpc
from rft_platform.training.service.rpc import CommandServer, Connection


@pytest.fixture
def server() -> Iterator[CommandServer]:
    server = CommandServer("secret", lambda: {"pid": 1})
    yield server
    server.close()


def open_command(server: CommandServer, command: str, token: str = "secret") -> Connection:
    connection = Connection(socket.create_connection(("127.0.0.1", server.port), timeout=10))
    connection.send_token(token)
    connection.send({"command": command})
    return connection


def ask(server: CommandServer, command: str, token: str = "secret") -> list[Message]:
    connection = open_command(server, command, token)
    events = list(connection)
    connection.close()
    return events


def test_a_wrong_token_is_turned_away(server) -> None:
    (answer,) = ask(server, "status", token="guess")
    assert answer["event"] == "error" and "wrong token" in answer["message"]
    assert "secret" not in str(answer)


def open_socket(server: CommandServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


@pytest.mark.parametrize("start", [b"x" * 1000, b"guess\n" + b"x" * 1000, b"\xff\xfe\n"])
def test_bytes_without_the_token_are_not_read(server: CommandServer, start: bytes) -> None:
    before = rss_mb()
    with open_socket(server) as caller, suppress(ConnectionError):
        caller.sendall(start)
        for _ in range(200):
            caller.sendall(b"x" * 2**20)  # refused at once, not after 200 MB without a newline
        pytest.fail("the server read 200 MB of a caller without the token")
    assert rss_mb() - before < 50
    assert ask(server, "status")[0]["event"] == "done"


def test_a_caller_that_sends_no_token_is_dropped(server: CommandServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "TOKEN_TIMEOUT_S", 0.5)
    callers = [open_socket(server) for _ in range(20)]
    start = time.monotonic()
    for caller in callers:
        caller.sendall(b"s")
        assert caller.recv(1) == b""
        caller.close()
    assert time.monotonic() - start < 5
    assert ask(server, "status")[0]["event"] == "done"


@pytest.mark.parametrize("line", [b"[1]\n", b"[" * 100_000 + b"\n", b"5\n", b"no JSON\n"])
def test_a_message_that_is_no_object_ends_the_connection(server: CommandServer, line: bytes) -> None:
    with open_socket(server) as caller:
        caller.sendall(b"secret\n" + line)
        assert caller.recv(1) == b""
    assert ask(server, "status")[0]["event"] == "done"


def test_an_unknown_command_is_an_error(server) -> None:
    assert ask(server, "dance")[0]["message"] == "unknown command 'dance'"


def test_jobs_wait_their_turn_and_can_be_watched_and_cancelled(server) -> None:
    first, second = open_command(server, "train"), open_command(server, "train")
    job = server.next_job(10)
    assert ask(server, "status") == [{"event": "done", "status": {"pid": 1, "busy": True}}]
    assert not server.cancelled.is_set()
    assert ask(server, "cancel") == [{"event": "done", "cancelled": True}]
    assert server.cancelled.is_set()
    job.send({"event": "step"})
    server.finish(job, {"event": "done"})
    assert ask(server, "cancel") == [{"event": "done", "cancelled": False}]
    follower = server.next_job(10)
    assert not server.cancelled.is_set()  # the cancellation was for the first alone
    server.finish(follower, {"event": "done"})
    heard = sorted([[event["event"] for event in connection] for connection in (first, second)], key=len)
    assert heard == [["accepted", "done"], ["accepted", "step", "done"]]
    first.close()
    second.close()


def test_a_caller_who_leaves_does_not_stop_the_job(server) -> None:
    connection = open_command(server, "train")
    next(iter(connection))
    job = server.next_job(10)
    connection.close()
    for _ in range(100):
        job.send({"event": "step"})
    server.finish(job, {"event": "done"})
    assert not job.listening


def test_after_the_time_out_nothing_is_accepted(server) -> None:
    assert server.next_job(0.01) is None
    assert ask(server, "train") == []


def test_errors_keep_their_kind_over_the_wire() -> None:
    for error in (UserError("no file"), NonFiniteError("row r1"), TrainerError("gone")):
        with pytest.raises(type(error), match=str(error)):
            raise_error(error_message(error))


def test_a_message_cut_short_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    received: list[Message] = []
    reader = threading.Thread(target=lambda: received.extend(Connection(ours)))
    reader.start()
    theirs.sendall(b'{"event": "accepted"}\n{"event": "do')
    theirs.close()
    reader.join(10)
    assert received == [{"event": "accepted"}]
    ours.close()
