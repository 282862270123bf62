"""Auxiliary models: served models that workflows and judges may call; they are neither trained nor recorded.

The limits are enforced in the HTTP transport below an ordinary client, so they hold however the client is used.
"""

import asyncio
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import openai

from rft_platform.common.errors import UserError
from rft_platform.common.redaction import hide
from rft_platform.inference.http_contract import NO_KEY
from rft_platform.openai_api.messages import with_defaults
from rft_platform.rollout.recording.httpx_compat import tls_context, wire
from rft_platform.rollout.recording.model_handle import chat_once

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


@dataclass(frozen=True, slots=True)
class AuxiliarySpec:
    """Where a model is served and how to call it; plain JSON values.

    The only API keys in it are those of the platform's own engines; such a key is valid while its engine runs.
    """

    name: str  # the name that workflows and judges use
    model: str  # the ``model`` field of a request
    base_url: str  # root of an OpenAI-compatible API, usually ending in /v1
    api_key_env: str | None = None  # environment variable with the key; None: no key needed
    timeout_s: float = 300.0  # seconds for one attempt
    max_concurrency: int = 16  # concurrent requests: in each event loop, and in all threads together
    other_urls: tuple[str, ...] = ()  # further replicas, used in turn
    defaults: dict[str, Any] = field(default_factory=dict)  # values of chat request fields that the caller omits
    engine_keys: tuple[str, ...] = field(default=(), repr=False)  # API keys of the platform's engines, one for each URL
    identity: str = ""  # part of the key of stored answers; empty: model, base_url and defaults

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "AuxiliarySpec":
        """Read the JSON values of a specification, as ``asdict`` gives them."""
        return cls(**{**value, **{name: tuple(value.get(name, ())) for name in ("other_urls", "engine_keys")}})

    def api_key(self) -> str:
        """Return the API key. Raises UserError if the environment variable with the key is not set."""
        if self.api_key_env is None:
            return self.engine_keys[0] if self.engine_keys else NO_KEY
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UserError(
                f"auxiliary model {self.name!r}: the environment variable {self.api_key_env} is not set; export the "
                f"key of {self.base_url} in it (every process that runs workflows or judges needs it)"
            )
        hide(key)
        return key


class AuxiliaryModel:
    """One auxiliary model, usable from any thread or event loop. Its calls are not recorded."""

    def __init__(self, spec: AuxiliarySpec) -> None:
        """Raises UserError if the environment variable that ``spec`` names for the API key is not set."""
        self.spec = spec
        self.name = spec.name
        self._key = spec.api_key()
        self._creating = threading.Lock()  # else each concurrent first caller would get its own client and slots
        self._async: openai.AsyncOpenAI | None = None
        self._sync: openai.OpenAI | None = None

    def __repr__(self) -> str:
        return f"AuxiliaryModel({self.name!r}, {self.model_name!r} at {self.spec.base_url})"

    @property
    def model_name(self) -> str:
        """Value of ``model`` in a request."""
        return self.spec.model

    @property
    def identity(self) -> str:
        """Part of the key of stored answers; differs between models, and between different defaults of one model."""
        defaults = f" {json.dumps(self.spec.defaults, sort_keys=True)}" if self.spec.defaults else ""
        return self.spec.identity or f"{self.spec.model} at {self.spec.base_url}{defaults}"

    def get_openai_async_client(self) -> openai.AsyncOpenAI:
        """Return an ``openai.AsyncOpenAI`` with its usual retries; the same object until it is closed."""
        with self._creating:
            if self._async is None or self._async.is_closed():
                self._async = async_client(self.spec, self._key)
            return self._async

    def get_openai_client(self) -> openai.OpenAI:
        """Return the blocking ``openai.OpenAI``; use it from a thread. The same object until it is closed."""
        with self._creating:
            if self._sync is None or self._sync.is_closed():
                self._sync = sync_client(self.spec, self._key)
            return self._sync

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Return the assistant message that continues ``messages``, in the API format; raises errors of ``openai``."""
        return await chat_once(self.get_openai_async_client(), self.model_name, messages, tools, arguments)

    async def aclose(self) -> None:
        """Close the clients; a later call creates new ones."""
        if self._async is not None:
            await self._async.close()
        self.close()

    def close(self) -> None:
        """Close only the blocking client; the async client keeps no connections between requests."""
        if self._sync is not None:
            self._sync.close()
