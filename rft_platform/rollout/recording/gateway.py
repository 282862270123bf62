"""HTTP gateway: an OpenAI-compatible API on loopback that records the calls of agents in other processes.

An agent in any language needs only the gateway's base URL and a key to be recorded. The bearer key of a request,
``<batch>/<task>/<run>.<secret>``, names the run; the secret authenticates the caller. The request then passes through
the same recorder and the same router as requests of the platform's own clients. Importing this module imports
``openai``.
"""

import asyncio
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from rft_platform.common import json_codec
from rft_platform.common.errors import RftError
from rft_platform.inference.serving.api_guard import check_caller, contained, refuse_stranger, send_error
from rft_platform.inference.serving.http_server import ServerThread
from rft_platform.inference.serving.request_body import MAX_BODY_BYTES, read_body
from rft_platform.openai_api.errors import ApiError, describe
from rft_platform.openai_api.schema import BODIES, document
from rft_platform.openai_api.streams import data_event
from rft_platform.rollout.recording.history import RunEndedError, RunHistory
from rft_platform.rollout.recording.httpx_compat import wire
from rft_platform.rollout.recording.recorder import ENDPOINTS
from rft_platform.web_guard.checks import bearer_token, configured_hosts, headers_of, tokens_match

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
_BACKLOG = 1024
_GRACE_S = 1  # seconds for answers in progress when the gateway stops
_JOIN_S = 10.0
_PREFIX = "/v1"
_DOCUMENT = "/openapi.json"
_SERVED = f"POST {', '.join(BODIES)} and GET /v1/models"
_SECRET_BYTES = 24
_FORWARDED = ("content-type", "x-stainless-retry-count", "idempotency-key")
_NOT_RETURNED = (b"transfer-encoding", b"connection", b"date", b"server")

Transport = Any  # wire.AsyncBaseTransport of whichever package is installed


class RunRecord:
    """A run that the gateway serves: its connections to the engine, and its requests in progress."""

    def __init__(self, key: str, history: RunHistory, make_transport: Callable[[RunHistory], Transport]) -> None:
        self.key = key
        self.history = history
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self.requests: set[asyncio.Task[None]] = set()

    @property
    def transport(self) -> Transport:
        """The transport, created at the first request: only the gateway's event loop may use it."""
        if self._transport is None:
            self._transport = self._make_transport(self.history)
        return self._transport

    async def close(self) -> None:
        """Cancel the requests in progress and close the connections."""
        for request in tuple(self.requests):
            request.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)
        if self._transport is not None:
            await self._transport.aclose()


class RecordingGateway:
    """The gateway: runs in a thread with its own event loop, so that a blocking workflow does not delay its agent."""

    def __init__(self, engine_url: str, timeout_s: float, make_transport: Callable[[RunHistory], Transport]) -> None:
        """Requests are sent to ``engine_url`` (ends in /v1) through the recording transport of their run."""
        self._runs: dict[str, RunRecord] = {}  # running runs, by the name in their key
        self._names: dict[int, str] = {}  # id of a history -> name
        self._ended: dict[str, str] = {}  # name -> key, of ended runs
        self._numbers = itertools.count()
        self._make_transport = make_transport
        self._lock = threading.Lock()
        listener = socket.create_server((HOST, 0), backlog=_BACKLOG)  # callers are queued from now on
        self._port = listener.getsockname()[1]
        app = contained(GatewayApp(engine_url, timeout_s, self._runs, self._ended))
        self._closing: list[Future[None]] = []
        self._server = ServerThread(app, listener, "recording-gateway", _GRACE_S)

    @property
    def base_url(self) -> str:
        """Base URL that agents use instead of the URL of OpenAI's API; ends in /v1."""
        return f"http://{HOST}:{self._port}{_PREFIX}"

    def register(self, history: RunHistory) -> str:
        """Return the key of ``history``: ``<batch>/<task>/<run>.<secret>``, the same at every call.

        Each attempt at a run has its own key: processes that an earlier attempt left running cannot use it.
        """
        with self._lock:
            name = self._names.get(id(history))
            if name is None:
                name = run = history.key or "unnamed/run/0"
                while name in self._runs or name in self._ended:
                    name = f"{run}.{next(self._numbers)}"
                self._names[id(history)] = name
                key = f"{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"
                self._runs[name] = RunRecord(key, history, self._make_transport)
            return self._runs[name].key

    def end(self, history: RunHistory) -> None:
        """End the run: refuse its key from now on, and cancel its requests in progress."""
        with self._lock:
            name = self._names.pop(id(history), None)
            if name is None:
                return
            record = self._runs.pop(name)
            self._ended[name] = record.key
            self._forget(record)

    def close(self) -> None:
        """End all runs and stop listening."""
        with self._lock:
            self._ended.update({name: record.key for name, record in self._runs.items()})
            for record in self._runs.values():
                self._forget(record)
            self._runs.clear()
            self._names.clear()
        wait(self._closing, _JOIN_S)
        self._server.close()

    def _forget(self, record: RunRecord) -> None:
        if (loop := self._server.running_loop) is not None:
            self._closing = [closing for closing in self._closing if not closing.done()]
            self._closing.append(asyncio.run_coroutine_threadsafe(record.close(), loop))


class RecordingApp:
    """ASGI application that sends OpenAI calls to the engine through the recording transport of their run.

    A subclass implements ``find_run``, which says to which run a request belongs.
    """

    def __init__(self, engine_url: str, timeout_s: float, most_bytes: int = MAX_BODY_BYTES) -> None:
        """``engine_url``: root of the engine's OpenAI API; ``timeout_s``: limit of each network step of a request.

        ``most_bytes``: limit of a request's body.
        """
        self._most_bytes = most_bytes
        self._extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)}
        self._hosts = configured_hosts()
        root = engine_url.rstrip("/")
        served = [("GET", "/models"), *(("POST", endpoint) for endpoint in ENDPOINTS)]
        self._urls = {(method, _PREFIX + path): wire.URL(root + path) for method, path in served}

    def find_run(self, headers: Mapping[str, str]) -> RunRecord:
        """The run that a request with these headers (names in lower case) belongs to; raises ApiError for none."""
        raise NotImplementedError

    async def send(self, record: RunRecord, request: Any) -> Any:
        """Send a request to the engine and return its response."""
        return await record.transport.handle_async_request(request)

    async def admit(self, record: RunRecord, request: Any) -> None:
        """Called with each request before it is sent; raises ApiError to refuse it. Does nothing here."""

    def ended(self, record: RunRecord, *, cancelled: bool) -> None:
        """Called when an admitted request is over; ``cancelled``: by its client or its run. Does nothing here."""

    def before_sending(self, record: RunRecord, headers: Mapping[str, str]) -> None:
        """Called before each part of an answer is sent. Does nothing here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; cancel it if its client disconnects or its run ends."""
        if scope["type"] != "http":
            return
        answer = _Answer(send)
        try:
            headers = headers_of(scope)
            check_caller(scope["method"], headers, self._hosts)
            record = self.find_run(headers)
            if (scope["method"], scope["path"]) == ("GET", _DOCUMENT):
                await answer.whole(json_codec.dump(document()))
                return
        except ApiError as error:
            await refuse_stranger(error, receive, send)
            return
        try:
            body = await read_body(receive, self._most_bytes)
            request = self._request(scope["method"], scope["path"], headers, body)
            await self.admit(record, request)
        except ApiError as error:
            await send_error(error, send)
            return
        answer.before_sending = partial(self.before_sending, record, headers)
        work = asyncio.ensure_future(self._answer(record, request, answer))
        watching = asyncio.ensure_future(_cancel_at_disconnect(receive, work))
        record.requests.add(work)
        try:
            await work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the server stops
                raise
            if not watching.done():
                await answer.refuse(_ended())
        finally:
            watching.cancel()
            record.requests.discard(work)
            self.ended(record, cancelled=not work.done() or work.cancelled())

    def _request(self, method: str, path: str, headers: dict[str, str], content: bytes) -> Any:
        url = self._urls.get((method, path))
        if url is None:
            raise ApiError(404, f"{method} {path}: no such route; the routes are {_SERVED}", "not_found")
        forwarded = [(name, headers[name]) for name in _FORWARDED if name in headers]
        return wire.Request(method, url, headers=forwarded, content=content, extensions=dict(self._extensions))

    async def _answer(self, record: RunRecord, request: Any, answer: "_Answer") -> None:
        try:
            response = await self.send(record, request)
            # A response that is closed has been read: its stream would wait for data that the engine sent before.
            if response.is_closed or "content-length" in response.headers:
                content = await response.aread()
                await answer.begin(response)
                await answer.body(content)
                return
            await answer.begin(response)
            try:
                async for data in response.stream:
                    await answer.body(data, more=True)
            finally:
                await response.aclose()
            await answer.body(b"")
        except RunEndedError:
            await answer.refuse(_ended())
        except wire.TransportError as error:
            LOG.warning("the engine did not answer a request of the recording gateway: %r", error)
            await answer.refuse(ApiError(502, f"the engine did not answer: {error!r}", "engine_unavailable"))
        except RftError as error:
            await answer.refuse(error)


class GatewayApp(RecordingApp):
    """Serves the runs of an explore batch: the key of a request names its run."""

    def __init__(self, engine_url: str, timeout_s: float, runs: dict[str, RunRecord], ended: dict[str, str]) -> None:
        """``runs``: running runs by name; ``ended``: keys of ended runs by name. Both may change at any time."""
        super().__init__(engine_url, timeout_s)
        self._runs = runs
        self._ended = ended

    def find_run(self, headers: Mapping[str, str]) -> RunRecord:
        """The running run that the bearer key names; raises ApiError (401) for any other key."""
        key = bearer_token(headers) or ""
        name = key.rpartition(".")[0]
        record = self._runs.get(name)
        if record is not None and tokens_match(key, record.key):
            return record
        if tokens_match(key, self._ended.get(name, "")):
            raise _ended()
        given = "the key of this request belongs to no run" if key else "this request has no key"
        raise ApiError(401, f"the bearer key must be the `api_key` of the run's model; {given}", "unknown_run")


class _Answer:
    """Writes one HTTP response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self.before_sending: Callable[[], None] | None = None

    async def begin(self, response: Any) -> None:
        """Send the status and the headers of the engine's response."""
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _NOT_RETURNED]
        self._begun = True
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})

    async def body(self, data: bytes, more: bool = False) -> None:
        """Send a part of the body; ``more`` is False for the last part. ``before_sending`` is called first."""
        if self.before_sending is not None:
            self.before_sending()
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, error: Exception) -> None:
        """Send an error in OpenAI's format; if a streamed answer has started, send it as the last event."""
        status, body = describe(error)
        if self._begun:
            await self.body(data_event(body))
        else:
            await self.whole(json_codec.dump(body), status)

    async def whole(self, content: bytes, status: int = 200) -> None:
        """Send a JSON response of the gateway itself."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self.body(content)


def _ended() -> ApiError:
    return ApiError(401, "this run has ended: model calls after its workflow returned are refused", "run_ended")


async def _cancel_at_disconnect(receive: Receive, work: "asyncio.Task[None]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()
