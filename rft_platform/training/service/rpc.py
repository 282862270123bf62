"""Trainer RPC over loopback: a connection that carries JSON lines, and the server, which runs one command at a time.

A caller sends a token line first, so that the server checks it before it reads or parses anything larger. Then both
ends send one JSON object per line. Threads of the server only receive, answer and send heartbeats; the caller of
``next_job`` does the work. Status and cancel are served meanwhile.
"""

import hmac
import json
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from rft_platform.common.errors import TrainerError
from rft_platform.training.protocol import HEARTBEAT, HEARTBEAT_S, Message, error_message

MAX_TOKEN_BYTES = 512
MAX_MESSAGE_BYTES = 1 << 30
TOKEN_TIMEOUT_S = 5.0  # from the connection until the end of the token line
SEND_TIMEOUT_S = 30.0  # after this time the server drops a caller that does not read; its command continues
_POLL_S = 0.1  # polling interval for ``close``
_QUEUED = ("train", "score", "shutdown")


class Connection:
    """A socket that carries JSON lines; both ends use it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("rb")

    def send_token(self, token: str) -> None:
        """Authenticate the caller. Must be called before its first message."""
        self._socket.sendall(token.encode() + b"\n")

    def receive_token(self) -> str:
        """Read the caller's token line, within fixed limits of time and size.

        Raises OSError if it does not arrive in time, ValueError if it is too long or is not text.
        """
        deadline, line, timeout = time.monotonic() + TOKEN_TIMEOUT_S, b"", self._socket.gettimeout()
        while not line.endswith(b"\n"):
            if len(line) > MAX_TOKEN_BYTES:
                raise ValueError(f"the token line is longer than {MAX_TOKEN_BYTES} bytes")
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            byte = self._socket.recv(1)  # byte by byte: the buffered reader must get everything after the line
            if not byte:
                raise ConnectionError("the caller closed the connection before it sent a token")
            line += byte
        self._socket.settimeout(timeout)
        return line[:-1].decode()

    def send(self, message: Message) -> None:
        """Write one message. Raises OSError if the other end has closed."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the other end closes. A line cut short by the death of its sender is ignored.

        Raises ValueError for a line that is not a JSON object or is longer than ``MAX_MESSAGE_BYTES``.
        """
        while (line := self._reader.readline(MAX_MESSAGE_BYTES)).endswith(b"\n"):
            yield _parse(line)
        if len(line) == MAX_MESSAGE_BYTES:
            raise ValueError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")

    def close(self) -> None:
        """Close both directions."""
        self._reader.close()
        self._socket.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, not {type(message).__name__}")
    return message


@dataclass(slots=True)
class Job:
    """A queued command, and the connection to which its events are sent."""

    message: Message
    connection: Connection
    listening: bool = True
    done: threading.Event = field(default_factory=threading.Event)
    _sending: threading.Lock = field(default_factory=threading.Lock)  # events and heartbeats come from two threads

    def send(self, message: Message) -> None:
        """Send an event. The job continues if the caller has disconnected."""
        with self._sending:
            if not self.listening:
                return
            try:
                self.connection.send(message)
            except OSError:
                self.listening = False


class CommandServer:
    """Listens on ``port`` of the loopback interface. Every connection must send ``token``.

    ``train``, ``score`` and ``shutdown`` are queued; ``status`` and ``cancel`` are answered even while a job runs.
    """

    def __init__(self, token: str, status: Callable[[], Message], beats: Callable[[], bool] = lambda: True) -> None:
        """``beats`` returns whether the group can make progress; no heartbeat is sent while it returns False."""
        self._beats = beats
        self.cancelled = threading.Event()
        self._token = token
        self._status = status
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._lock = threading.Lock()
        self._running: Job | None = None
        self._closed = False
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.commands = self
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True).start()

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    def next_job(self, timeout_s: float) -> Job | None:
        """Wait for the next command. After ``timeout_s`` without one, return None and accept no further commands."""
        try:
            job = self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                self._closed = self._jobs.empty()
            if self._closed:
                return None
            job = self._jobs.get()
        with self._lock:
            self.cancelled.clear()
            self._running = job
        return job

    def finish(self, job: Job, message: Message) -> None:
        """End the running job and send its last event."""
        with self._lock:
            self._running = None
        job.send(message)
        job.done.set()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def serve(self, connection: Connection) -> None:
        """Check the caller's token, then serve its command. Raises OSError or ValueError if the caller misbehaves."""
        if not hmac.compare_digest(connection.receive_token().encode(), self._token.encode()):
            connection.send(error_message(TrainerError("wrong token: read it from the trainer's lease file")))
            return
        for message in connection:
            self.answer(message, connection)
            return

    def answer(self, message: Message, connection: Connection) -> None:
        """Serve one command of an authenticated caller, on the thread of its connection."""
        command = message.get("command")
        if command == "status":
            connection.send({"event": "done", "status": self._status() | {"busy": self._running is not None}})
        elif command == "cancel":
            connection.send({"event": "done", "cancelled": self._cancel()})
        elif command in _QUEUED:
            self._queue(Job(message, connection))
        else:
            connection.send(error_message(TrainerError(f"unknown command {command!r}")))

    def _cancel(self) -> bool:
        with self._lock:
            training = self._running is not None and self._running.message["command"] == "train"
            if training:
                self.cancelled.set()
        return training

    def _queue(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                return  # the connection closes without "accepted": the caller starts a new group
            job.send({"event": "accepted"})
            self._jobs.put(job)
        # No time limit: this thread ends with the job, with the process, or when the caller has disconnected. The
        # closed connection tells a caller that did not read for long (a stopped driver) to repeat the request.
        while job.listening and not job.done.wait(HEARTBEAT_S):
            if self._beats():
                job.send({"event": HEARTBEAT})


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
    commands: CommandServer


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(SEND_TIMEOUT_S)
        with suppress(OSError, ValueError):  # the caller has disconnected, is too slow, or sends invalid data
            cast(_Server, self.server).commands.serve(Connection(self.request))
