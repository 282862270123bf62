"""OpenAI clients whose chat calls are recorded. Importing this module imports ``openai``: do so only to run agents.

Recording sits in the HTTP transport below an ordinary ``openai.AsyncOpenAI`` or ``openai.OpenAI``, so it sees what
goes over the wire whatever the caller does above it: raw responses, ``with_options`` copies, streams, helper methods.
A request that a client sends again is recorded once, because only an answer that reached the caller is recorded.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from time import perf_counter, time
from typing import Any

import openai

from rft_platform.inference.replicas import Replicas
from rft_platform.rollout import chat_wire
from rft_platform.rollout.history import RecordedCall, RunHistory
from rft_platform.rollout.routing import AsyncRouter, SyncRouter
from rft_platform.rollout.wire import TOKENS, wire

_RECORDED_PATH = "/chat/completions"
_BYTES_A_TOKEN = 4  # of a request, roughly
_API_KEY = "EMPTY"  # the client refuses to be without one


class RecordingClients:
    """Makes clients of one engine. Each has connections of its own: a pool of hundreds is searched at every request.

    With ``replicas`` each request goes to one of these, whatever host ``base_url`` names.
    """

    def __init__(self, base_url: str, timeout_s: float, replicas: Replicas | None = None) -> None:
        self._base_url = base_url
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._tls = wire.create_ssl_context()  # reads the certificates: once, not for every client

    def async_client(self, history: RunHistory) -> openai.AsyncOpenAI:
        """A client whose chat calls go into ``history``; ``await client.close()`` when done."""
        connections: Any = wire.AsyncHTTPTransport(verify=self._tls)
        transport: Any = AsyncRecorder(self._routed(AsyncRouter, connections), history)
        # trust_env would route calls around the recorder where the environment names a proxy.
        http = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False, timeout=self._timeout_s)
        return openai.AsyncOpenAI(base_url=self._base_url, api_key=_API_KEY, http_client=http, timeout=self._timeout_s)

    def sync_client(self, history: RunHistory) -> openai.OpenAI:
        """A client whose chat calls go into ``history``, for use off the event loop's thread; ``close()`` when done."""
        connections: Any = wire.HTTPTransport(verify=self._tls)
        transport: Any = SyncRecorder(self._routed(SyncRouter, connections), history)
        http = openai.DefaultHttpxClient(transport=transport, trust_env=False, timeout=self._timeout_s)
        return openai.OpenAI(base_url=self._base_url, api_key=_API_KEY, http_client=http, timeout=self._timeout_s)

    def _routed(self, router: Callable[[Any, Replicas], Any], connections: Any) -> Any:
        return connections if self._replicas is None else router(connections, self._replicas)


class AsyncRecorder(wire.AsyncBaseTransport):
    """Records the chat calls that pass through ``inner``."""

    def __init__(self, inner: Any, history: RunHistory) -> None:
        self._inner = inner
        self._history = history

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, recorded if it is a chat call."""
        try:
            if not request.url.path.endswith(_RECORDED_PATH):
                return await self._inner.handle_async_request(request)
            await request.aread()
            call = _ChatCall(request, self._history)
            response = await self._inner.handle_async_request(call.request)
            if response.status_code != 200 or call.streamed:
                return call.passed_on(response)
            await response.aread()
            await response.aclose()
        except wire.TransportError:
            self._history.connection_lost = True
            raise
        return call.finished(response)


class SyncRecorder(wire.BaseTransport):
    """The same for the blocking client."""

    def __init__(self, inner: Any, history: RunHistory) -> None:
        self._inner = inner
        self._history = history

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def handle_request(self, request: Any) -> Any:
        """Send a request, recorded if it is a chat call."""
        try:
            if not request.url.path.endswith(_RECORDED_PATH):
                return self._inner.handle_request(request)
            request.read()
            call = _ChatCall(request, self._history)
            response = self._inner.handle_request(call.request)
            if response.status_code != 200 or call.streamed:
                return call.passed_on(response)
            response.read()
            response.close()
        except wire.TransportError:
            self._history.connection_lost = True
            raise
        return call.finished(response)


class _ChatCall:
    """One chat request on its way out, and its answer on the way back."""

    def __init__(self, request: Any, history: RunHistory) -> None:
        self._history = history
        self._order, self._env_state_hash = history.begin_call(), history.env_state_hash
        self._created_at, self._started = time(), perf_counter()
        history.client_retries += request.headers.get("x-stainless-retry-count", "0") != "0"
        self._sent, self._asked = chat_wire.prepare(
            json.loads(request.content), history.model, history.sampling, history.call_seed(self._order)
        )
        self.streamed = bool(self._sent.get("stream"))
        self.request = self._rewritten(request)

    def _rewritten(self, request: Any) -> Any:
        headers = request.headers.copy()
        headers.pop("content-length", None)
        headers["accept-encoding"] = "identity"  # a streamed answer is read as it comes
        content = json.dumps(self._sent).encode()
        limit = self._sent.get("max_completion_tokens") or self._sent.get("max_tokens") or 0
        tokens = self.choices * int(limit) + len(content) // _BYTES_A_TOKEN
        extensions = {**request.extensions, TOKENS: tokens}
        return wire.Request(request.method, request.url, headers=headers, content=content, extensions=extensions)

    def passed_on(self, response: Any) -> Any:
        """A refusal as it came; a streamed answer with its events read as they pass."""
        if response.status_code != 200:
            return response
        stream = _TappedStream(response.stream, self, response.headers)
        return wire.Response(200, headers=response.headers, stream=stream, extensions=response.extensions)

    def finished(self, response: Any) -> Any:
        """Record a whole answer; return it as the caller asked for it."""
        answer = response.json()
        self.record(answer, response.headers)
        headers = response.headers.copy()
        for framing in ("content-length", "transfer-encoding"):
            headers.pop(framing, None)
        content = json.dumps(chat_wire.restore(answer, self._asked)).encode()
        return wire.Response(200, headers=headers, content=content, extensions=response.extensions)

    def restored_event(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """An event of a streamed answer as the caller asked for it."""
        fields = [line for line in event.split(b"\n") if not line.startswith(b"data:")]
        return b"\n".join([*fields, b"data: " + json.dumps(chat_wire.restore(chunk, self._asked)).encode()])

    @property
    def choices(self) -> int:
        """Number of choices that the answer will have."""
        return int(self._sent.get("n") or 1)

    def record(self, answer: dict[str, Any], headers: Any) -> None:
        """Add the choices of a whole answer to the run's history."""
        duration_s = perf_counter() - self._started
        prompt_ids, choices = chat_wire.sampled_choices(answer)
        self._history.add(
            [
                RecordedCall(
                    order=self._order,
                    choice=choice.index,
                    msg_id=answer["id"],
                    policy_version=chat_wire.policy_version(answer, headers),
                    prompt_ids=prompt_ids,
                    response_ids=choice.token_ids,
                    logprobs=choice.logprobs,
                    finish_reason=choice.finish_reason,
                    temperature=float(self._sent["temperature"]),
                    top_p=float(self._sent["top_p"]),
                    top_k=int(self._sent.get("top_k") or -1),
                    messages=self._sent["messages"],
                    tools=self._sent.get("tools") or [],
                    response=choice.message,
                    created_at=self._created_at,
                    duration_s=duration_s,
                    env_state_hash=self._env_state_hash,
                )
                for choice in choices
            ]
        )


class _TappedStream(wire.AsyncByteStream, wire.SyncByteStream):
    """The events of a streamed answer, recorded once every choice has finished and passed on as asked for."""

    def __init__(self, inner: Any, call: _ChatCall, headers: Any) -> None:
        self._inner = inner
        self._call = call
        self._headers = headers
        self._events = chat_wire.EventStream()
        self._answer = chat_wire.StreamedAnswer(call.choices)

    def __iter__(self) -> Iterator[bytes]:
        for data in self._inner:
            yield from self._passed(data)
        yield self._events.rest()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._inner:
            for event in self._passed(data):
                yield event
        yield self._events.rest()

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _passed(self, data: bytes) -> Iterator[bytes]:
        for event in self._events.feed(data):
            chunk = chat_wire.event_chunk(event)
            if chunk is not None:
                if self._answer.add(chunk):
                    self._call.record(self._answer.whole(), self._headers)
                event = self._call.restored_event(event, chunk)
            yield event + b"\n\n"
