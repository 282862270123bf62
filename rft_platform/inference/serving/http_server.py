"""Connection handling of the platform's HTTP servers: time-outs for incoming requests, and a long keep-alive."""

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rft_platform.inference.http_contract import KEEP_ALIVE_S

HEADERS_TIMEOUT_S = 20.0  # from the connection, or a later request's first byte, to the end of the request's headers
BODY_TIMEOUT_S = 120.0  # from the headers to the end of the body

_JOIN_S = 10.0  # added to the grace period when a server thread is joined

_UvicornProtocol: Any = AutoHTTPProtocol  # the fastest protocol class that is installed


class TimedProtocol(_UvicornProtocol):
    """uvicorn's HTTP protocol with time-outs: closes a connection whose request does not arrive in time.

    uvicorn itself waits without limit, so a client could keep any number of incomplete requests open.
    """

    _timer: asyncio.TimerHandle | None = None
    _waits_for: str | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Restart the timer when the request reaches the next stage; stop it when the request is complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._set_timer(None)
        super().connection_lost(exc)

    def _watch(self) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._set_timer("headers", HEADERS_TIMEOUT_S)
        elif cycle.more_body:
            self._set_timer("body", BODY_TIMEOUT_S)
        else:
            self._set_timer(None)

    def _set_timer(self, waits_for: str | None, seconds: float = 0.0) -> None:
        """Set the timer for a stage. Data within a stage does not restart it, so slow senders are disconnected."""
        if waits_for == self._waits_for and waits_for is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waits_for = waits_for
        self._timer = None if waits_for is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def server_config(app: Any, grace_s: int, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for a server of the platform; ``grace_s``: how long a shutdown waits for open connections."""
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        **options,
    )


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
