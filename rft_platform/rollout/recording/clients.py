"""OpenAI clients whose model calls are recorded. Importing this module imports ``openai``: do so only to run agents.

The HTTP transport below an ordinary ``openai.AsyncOpenAI`` or ``openai.OpenAI`` records the calls. The transport sees
every request, however the client is used: raw responses, ``with_options`` copies, streams, helper methods.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai

from rft_platform.common import json_codec
from rft_platform.common.errors import UserError
from rft_platform.inference.http_contract import NO_KEY
from rft_platform.inference.pool.replicas import Replicas
from rft_platform.openai_api.errors import describe
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.httpx_compat import (
    OTHER_ENGINE,
    PARSED,
    TOKENS,
    many_connections,
    tls_context,
    wire,
)
from rft_platform.rollout.recording.recorder import CallRecorder, recorded_path
from rft_platform.rollout.recording.routing import AsyncRouter, SyncRouter

if TYPE_CHECKING:
    from rft_platform.rollout.recording.gateway import RecordingGateway

_OK, _BAD_REQUEST = 200, 400


class RecordingClients:
    """Creates clients, transports and a gateway for one engine that record the calls of runs.

    Each client has its own connections: a shared pool of hundreds would be searched at every request. If ``replicas``
    is given, each request goes to one of the replicas, whatever host ``base_url`` names.
    """

    def __init__(
        self, base_url: str, timeout_s: float, replicas: Replicas | None = None, api_key: str = NO_KEY
    ) -> None:
        """``api_key``: the key of the API at ``base_url``; each of ``replicas`` has its own."""
        self._base_url = base_url
        self._api_key = api_key
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._gateway: RecordingGateway | None = None
        self._lock = threading.Lock()

    def async_client(self, history: RunHistory, loop: asyncio.AbstractEventLoop | None = None) -> openai.AsyncOpenAI:
        """Return a client that records its model calls into ``history``; ``await client.close()`` when done.

        It works in one event loop; with ``loop``, in which it must be closed, in any number of loops.
        """
        transport = self.async_transport(history, None if loop is None else _LoopConnections(loop))
        # With trust_env, a proxy named in the environment would bypass the recorder.
        http = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False, timeout=self._timeout_s)
        return openai.AsyncOpenAI(
            base_url=self._base_url, api_key=self._api_key, http_client=http, timeout=self._timeout_s
        )

    def sync_client(self, history: RunHistory) -> openai.OpenAI:
        """Return a blocking client that records into ``history``, for use off the event loop; ``close()`` when done."""
        connections: Any = wire.HTTPTransport(verify=tls_context())
        transport: Any = SyncRecorder(self._routed(SyncRouter, connections), history, self._api_key)
        http = openai.DefaultHttpxClient(transport=transport, trust_env=False, timeout=self._timeout_s)
        return openai.OpenAI(base_url=self._base_url, api_key=self._api_key, http_client=http, timeout=self._timeout_s)

    def async_transport(self, history: RunHistory, connections: Any = None) -> Any:
        """Return a transport that records into ``history`` and uses ``connections``, by default new connections."""
        connections = connections or wire.AsyncHTTPTransport(verify=tls_context())
        return AsyncRecorder(self._routed(AsyncRouter, connections), history, self._api_key)

    @property
    def gateway(self) -> "RecordingGateway":
        """The gateway for agents in other processes; it starts to listen at the first access."""
        from rft_platform.rollout.recording.gateway import (
            RecordingGateway,  # imports server packages: optional for agents
        )

        with self._lock:
            if self._gateway is None:
                self._gateway = RecordingGateway(self._base_url, self._timeout_s, self._gateway_transport)
            return self._gateway

    def end(self, history: RunHistory) -> None:
        """End the run: the gateway, if there is one, refuses further calls of the run."""
        if self._gateway is not None:
            self._gateway.end(history)

    def close(self) -> None:
        """Stop the gateway, if there is one."""
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()

    def _gateway_transport(self, history: RunHistory) -> Any:
        return self.async_transport(history, many_connections())

    def _routed(self, router: Callable[[Any, Replicas], Any], connections: Any) -> Any:
        return connections if self._replicas is None else router(connections, self._replicas)


class _LoopConnections(wire.AsyncBaseTransport):
    """Connections to the engine that are kept in one event loop; in other loops each request has its own connection.

    A blocking workflow may call ``asyncio.run`` several times, and nobody can close what a closed loop has left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._kept: Any = wire.AsyncHTTPTransport(verify=tls_context())
        limits = wire.Limits(max_connections=None, max_keepalive_connections=0)
        self._not_kept: Any = wire.AsyncHTTPTransport(verify=tls_context(), limits=limits)

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request."""
        connections = self._kept if asyncio.get_running_loop() is self._loop else self._not_kept
        return await connections.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the kept connections; the others end with their requests, in their loops."""
        if asyncio.get_running_loop() is self._loop:
            await self._kept.aclose()


class AsyncRecorder(wire.AsyncBaseTransport):
    """Transport that records the model calls that pass through ``inner``."""

    def __init__(self, inner: Any, history: RunHistory, api_key: str = NO_KEY) -> None:
        """``api_key`` replaces the key of every request: agents may have been given another one."""
        self._inner = inner
        self._history = history
        self._api_key = api_key

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; record it if it is a model call."""
        endpoint = recorded_path(request.url.path) if request.method == "POST" else None
        try:
            if endpoint is None:
                return await self._inner.handle_async_request(_with_key(request, self._api_key))
            try:
                call = await self._recorder(endpoint, request)
            except UserError as error:
                return _refusal(error)
            return await self._sent(call, _engine_request(_with_key(request, self._api_key), endpoint, call))
        except wire.TransportError:
            self._history.connection_lost = True
            raise

    async def _recorder(self, endpoint: str, request: Any) -> CallRecorder:
        """The recorder of a request. If a server has parsed a large body, another thread writes it for the engine.

        The calls of an agent are recorded in this thread: their order is that in which the agent sends them.
        """
        content, body = await request.aread(), request.extensions.get(PARSED)
        arguments = (endpoint, content, request.headers.raw, self._history, body)
        if body is not None and len(content) > json_codec.LARGE_BYTES:
            return await asyncio.to_thread(CallRecorder, *arguments)
        return CallRecorder(*arguments)

    async def _sent(self, call: CallRecorder, request: Any) -> Any:
        streamed = False
        try:
            response = await self._inner.handle_async_request(request)
            streamed = call.streamed and response.status_code == _OK
            if streamed:
                return _streamed(response, call)
            content = await response.aread()
            await response.aclose()
            return _answer(response, call, content)
        finally:
            if not streamed:
                call.ended()


class SyncRecorder(wire.BaseTransport):
    """Blocking counterpart of ``AsyncRecorder``."""

    def __init__(self, inner: Any, history: RunHistory, api_key: str = NO_KEY) -> None:
        """``api_key`` replaces the key of every request: agents may have been given another one."""
        self._inner = inner
        self._history = history
        self._api_key = api_key

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def handle_request(self, request: Any) -> Any:
        """Send a request; record it if it is a model call."""
        endpoint = recorded_path(request.url.path) if request.method == "POST" else None
        try:
            if endpoint is None:
                return self._inner.handle_request(_with_key(request, self._api_key))
            try:
                call = CallRecorder(endpoint, request.read(), request.headers.raw, self._history)
            except UserError as error:
                return _refusal(error)
            return self._sent(call, _engine_request(_with_key(request, self._api_key), endpoint, call))
        except wire.TransportError:
            self._history.connection_lost = True
            raise

    def _sent(self, call: CallRecorder, request: Any) -> Any:
        streamed = False
        try:
            response = self._inner.handle_request(request)
            streamed = call.streamed and response.status_code == _OK
            if streamed:
                return _streamed(response, call)
            content = response.read()
            response.close()
            return _answer(response, call, content)
        finally:
            if not streamed:
                call.ended()


def _with_key(request: Any, api_key: str) -> Any:
    request.headers["authorization"] = f"Bearer {api_key}"
    return request


def _engine_request(request: Any, endpoint: str, call: CallRecorder) -> Any:
    headers = wire.Headers(request.headers)
    headers["content-length"] = str(len(call.content))
    headers["accept-encoding"] = "identity"  # a streamed answer is parsed as it arrives
    url = request.url
    if call.engine_path != endpoint:
        url = url.copy_with(path=url.path.removesuffix(endpoint) + call.engine_path)
    extensions = {**request.extensions, TOKENS: call.tokens}
    if call.route is not None:  # a further policy, with its own engine
        url = wire.URL(call.route.base_url + call.engine_path)
        headers["host"] = url.netloc.decode()
        headers["authorization"] = f"Bearer {call.route.api_key}"
        extensions[OTHER_ENGINE] = True
    stream = wire.ByteStream(call.content)
    return wire.Request(request.method, url, headers=headers, stream=stream, extensions=extensions)


def _answer(response: Any, call: CallRecorder, content: bytes) -> Any:
    """Record a whole answer and return it as the caller asked for it; return a refusal unchanged."""
    status = response.status_code
    if status != _OK:
        call.refused(status, content)
        return response
    restored = call.answered(content, response.headers)
    if restored is content:
        return response
    headers = wire.Headers(response.headers)
    headers.pop("transfer-encoding", None)
    headers["content-length"] = str(len(restored))
    return wire.Response(status, headers=headers, stream=wire.ByteStream(restored), extensions=response.extensions)


def _refusal(error: UserError) -> Any:
    _, body = describe(error)
    return wire.Response(_BAD_REQUEST, headers={"content-type": "application/json"}, content=json_codec.dump(body))


def _streamed(response: Any, call: CallRecorder) -> Any:
    stream = _RecordedStream(response.stream, call, response.headers)
    return wire.Response(_OK, headers=response.headers, stream=stream, extensions=response.extensions)


class _RecordedStream(wire.AsyncByteStream, wire.SyncByteStream):
    """The bytes of a streamed answer, recorded as they pass."""

    def __init__(self, inner: Any, call: CallRecorder, headers: Any) -> None:
        self._inner = inner
        self._call = call
        self._events = call.event_stream(headers)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self._inner:
                yield from self._events.feed(data)
            yield self._events.rest()
        finally:
            self._call.ended()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._inner:
                yield b"".join(self._events.feed(data))  # events that arrived together are sent together
            yield self._events.rest()
        finally:
            self._call.ended()

    def close(self) -> None:
        self._call.ended()
        self._inner.close()

    async def aclose(self) -> None:
        self._call.ended()
        await self._inner.aclose()
