"""Connection handling of the platform's HTTP servers: time-outs for incoming requests, and a long keep-alive."""

import asyncio
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rft_platform.inference.http_contract import KEEP_ALIVE_S

#: Paths that do not reset an engine's idle time-out: monitoring must not keep an unused engine alive.
UNCOUNTED_PATHS = ("/health", "/ping", "/metrics", "/v1/models", "/engine/metrics")
HEADERS_TIMEOUT_S = 20.0  # from the connection, or a later request's first byte, to the end of the request's headers
BODY_TIMEOUT_S = 120.0  # from the headers to the end of the body

_JOIN_S = 10.0  # added to the grace period when a server thread is joined
_BACKLOG = 2048
_OTHER_FILES = 128  # files that a server needs beside its connections
_FILES_A_CONNECTION = 2  # a gateway has a connection to the engine for each connection of a client

_UvicornProtocol: Any = AutoHTTPProtocol  # the fastest protocol class that is installed


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections; None: ``BODY_TIMEOUT_S``, and any number."""

    body_timeout_s: float | None = None
    most: int | None = None

    @classmethod
    def within_open_files(cls, body_timeout_s: float, most: int) -> "ConnectionLimits":
        """Limits with at most ``most`` connections. Raises this process's limit of open files as far as permitted.

        If the limit is still too low, the number of connections is lower.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _OTHER_FILES + _FILES_A_CONNECTION * most
        if soft != resource.RLIM_INFINITY and soft < files:
            soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            most = min(most, max(1, (soft - _OTHER_FILES) // _FILES_A_CONNECTION))
        return cls(body_timeout_s, most)


class TimedProtocol(_UvicornProtocol):
    """uvicorn's HTTP protocol with time-outs: closes a connection whose request does not arrive in time.

    uvicorn itself waits without limit, so a client could keep any number of incomplete requests open. If the
    configuration limits the number of connections, a further connection closes the one that has waited longest for its
    client, so that idle or slow clients cannot exclude others.
    """

    _timer: asyncio.TimerHandle | None = None
    _waits_for: str | None = None
    _waits_since: float | None = None  # the loop's time; None: the server is at work

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        self._limits = getattr(self.config, "limits", ConnectionLimits())
        if self._limits.most is not None and len(self.connections) > self._limits.most:
            self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Restart the timer when the request reaches the next stage; stop it when the request is complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Watch the rest of the request's body, or a request that was sent before this response."""
        super().on_response_complete()
        self._watch(idle=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._set_timer(None)
        super().connection_lost(exc)

    def _watch(self, idle: bool = False) -> None:
        """Set the timer for what the connection waits for; ``idle``: no byte of the next request has arrived."""
        cycle = self.cycle
        if getattr(self, "pipeline", None):  # the server reads nothing before the response to the earlier request
            self._set_timer(None)
        elif cycle is not None and cycle.more_body:
            self._set_timer("body", self._limits.body_timeout_s or BODY_TIMEOUT_S)
        elif cycle is None or cycle.response_complete:
            self._set_timer("request" if idle else "headers", None if idle else HEADERS_TIMEOUT_S)
        else:
            self._set_timer(None)

    def _set_timer(self, waits_for: str | None, seconds: float | None = None) -> None:
        """Set the timer for a stage. Data within a stage does not restart it, so slow senders are disconnected."""
        if waits_for == self._waits_for and waits_for is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waits_for = waits_for
        self._waits_since = None if waits_for is None else self.loop.time()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client; this one if the server is at work on all."""
        waiting = [each for each in self.connections if each._waits_since is not None]
        oldest = min(waiting, key=lambda each: each._waits_since, default=self)
        oldest._set_timer(None)  # it is closed in the loop's next round: do not choose it again
        oldest.transport.abort()


class _Config(uvicorn.Config):
    """uvicorn's settings with the limits that ``TimedProtocol`` reads."""

    limits: ConnectionLimits


def server_config(app: Any, grace_s: int, *, limits: ConnectionLimits | None = None, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for a server of the platform; ``grace_s``: how long a shutdown waits for open connections."""
    config = _Config(
        app,
        http=TimedProtocol,
        ws="none",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        # connections that are accepted at once, before ``_make_room`` closes others
        backlog=_BACKLOG if limits is None or limits.most is None else min(_BACKLOG, limits.most),
        **options,
    )
    config.limits = limits or ConnectionLimits()
    return config


def serve(app: Any, host: str, port: int, grace_s: int, listening: Callable[[], None]) -> None:
    """Serve ``app`` until interrupted; ``listening`` is called when the port takes connections.

    Raises OSError if the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        listening()
        uvicorn.Server(server_config(app, grace_s, lifespan="off", log_level="warning")).run(sockets=[listener])


class ServerThread:
    """A server in a thread with its own event loop. It accepts connections on ``listener`` until ``close``."""

    def __init__(self, app: ASGIApp, listener: socket.socket, name: str, grace_s: int) -> None:
        self._grace_s = grace_s
        self._server = _Server(server_config(app, grace_s, lifespan="off", log_config=None, proxy_headers=False))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name=name, daemon=True)
        self._thread.start()

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop; None if the server has ended."""
        return self._server.loop.result(_JOIN_S) if self._thread.is_alive() else None

    def close(self) -> None:
        """Stop listening, and wait until responses in progress are sent or the grace period ends."""
        self._server.should_exit = True
        self._thread.join(self._grace_s + _JOIN_S)


class _Server(uvicorn.Server):
    """A uvicorn server that publishes its event loop in the future ``loop``."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.loop: Future[asyncio.AbstractEventLoop] = Future()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop.set_result(asyncio.get_running_loop())
        await super().serve(sockets)
