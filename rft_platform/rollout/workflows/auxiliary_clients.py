"""OpenAI clients of auxiliary models. Importing this module imports ``openai``: import it only to call a model.

The limits are enforced in the HTTP transport below an ordinary client, so they hold however the client is used.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import openai

from rft_platform.openai_api.messages import with_defaults
from rft_platform.rollout.recording.httpx_compat import tls_context, wire

if TYPE_CHECKING:
    from rft_platform.rollout.workflows.auxiliary import AuxiliarySpec

_CHAT_PATH = "/chat/completions"
#: Connections are not kept after a request: a connection belongs to one event loop, and each batch has a new loop.
_LIMITS = {"max_keepalive_connections": 0, "max_connections": None}


def async_client(spec: "AuxiliarySpec", key: str) -> openai.AsyncOpenAI:
    """Create a client for any event loop, also for several in turn."""
    transport: Any = BoundedAsyncTransport(spec)
    http = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False, timeout=spec.timeout_s)
    return openai.AsyncOpenAI(base_url=spec.base_url, api_key=key, http_client=http, timeout=spec.timeout_s)


def sync_client(spec: "AuxiliarySpec", key: str) -> openai.OpenAI:
    """Create the blocking client, for threads."""
    transport: Any = BoundedTransport(spec)
    http = openai.DefaultHttpxClient(transport=transport, trust_env=False, timeout=spec.timeout_s)
    return openai.OpenAI(base_url=spec.base_url, api_key=key, http_client=http, timeout=spec.timeout_s)


class BoundedAsyncTransport(wire.AsyncBaseTransport):
    """Sends at most ``max_concurrency`` requests at once per event loop; the wait does not count in the time-out."""

    def __init__(self, spec: "AuxiliarySpec") -> None:
        self._inner: Any = wire.AsyncHTTPTransport(verify=tls_context(), limits=wire.Limits(**_LIMITS))
        self._requests = _Requests(spec)
        self._count = spec.max_concurrency
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def handle_async_request(self, request: Any) -> Any:
        """Wait for a slot and send the request; the slot is released when the answer is closed."""
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
        await request.aread()
        await slots.acquire()
        try:
            response = await self._inner.handle_async_request(self._requests.prepare(request))
        except BaseException:
            slots.release()
            raise
        return _with_stream(response, _AsyncSlotStream(response.stream, slots))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class BoundedTransport(wire.BaseTransport):
    """Blocking counterpart of ``BoundedAsyncTransport``; the limit holds over all threads."""

    def __init__(self, spec: "AuxiliarySpec") -> None:
        self._inner: Any = wire.HTTPTransport(verify=tls_context(), limits=wire.Limits(**_LIMITS))
        self._requests = _Requests(spec)
        self._slots = threading.Semaphore(spec.max_concurrency)

    def handle_request(self, request: Any) -> Any:
        """Wait for a slot and send the request."""
        request.read()
        self._slots.acquire()
        try:
            response = self._inner.handle_request(self._requests.prepare(request))
        except BaseException:
            self._slots.release()
            raise
        return _with_stream(response, _SlotStream(response.stream, self._slots))

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class _Requests:
    """Prepares requests: addresses the next replica, and adds defaults for fields that the caller omits."""

    def __init__(self, spec: "AuxiliarySpec") -> None:
        self._defaults = spec.defaults
        self._origins = [wire.URL(url) for url in (spec.base_url, *spec.other_urls)]
        self._keys = spec.engine_keys
        self._turn = itertools.count()

    def prepare(self, request: Any) -> Any:
        """The request to send: ``request`` with the next replica's address and key, and the default fields."""
        url, headers, content = request.url, request.headers.copy(), request.content
        if len(self._origins) > 1:
            turn = next(self._turn) % len(self._origins)
            origin = self._origins[turn]
            if self._keys:
                headers["authorization"] = f"Bearer {self._keys[turn]}"
            url = url.copy_with(scheme=origin.scheme, host=origin.host, port=origin.port)
            headers["host"] = origin.netloc.decode()
        if self._defaults and url.path.endswith(_CHAT_PATH):
            content = json.dumps(with_defaults(json.loads(content), self._defaults)).encode()
            headers.pop("content-length", None)
        return wire.Request(request.method, url, headers=headers, content=content, extensions=request.extensions)


def _with_stream(response: Any, stream: Any) -> Any:
    return wire.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


class _AsyncSlotStream(wire.AsyncByteStream):
    """Response body that releases the slot when it is closed."""

    def __init__(self, inner: Any, slots: asyncio.Semaphore) -> None:
        self._inner = inner
        self._slots: asyncio.Semaphore | None = slots

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._inner:
            yield data

    async def aclose(self) -> None:
        slots, self._slots = self._slots, None
        try:
            await self._inner.aclose()
        finally:
            if slots is not None:
                slots.release()


class _SlotStream(wire.SyncByteStream):
    """Blocking counterpart of ``_AsyncSlotStream``."""

    def __init__(self, inner: Any, slots: threading.Semaphore) -> None:
        self._inner = inner
        self._slots: threading.Semaphore | None = slots

    def __iter__(self) -> Iterator[bytes]:
        yield from self._inner

    def close(self) -> None:
        slots, self._slots = self._slots, None
        try:
            self._inner.close()
        finally:
            if slots is not None:
                slots.release()
