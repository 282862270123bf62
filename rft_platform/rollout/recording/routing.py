"""HTTP transports that send each request to one replica of a pool, and to another one if the first does not answer.

Routing happens below recording, so a rerouted request is still one call for the recorder and the agent: it keeps its
seed, every replica would give the same answer, and only the answer that arrived is recorded.

A run stays on its first replica, the least loaded one at its first call: each turn of an agent begins with all earlier
turns, and a replica with a prefix cache does not compute these again. The run moves if its replica is clearly busier
than another. The runs of one group are NOT sent to the same replica: they share only their first prompt, which costs
one prefill per replica, while a whole group on one replica would leave the other replicas idle.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rft_platform.common.errors import EngineError
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.recording.httpx_compat import OTHER_ENGINE, TOKENS, wire

#: The connection broke or was not made. A read time-out is not included: another replica would take as long.
_LOST = (wire.NetworkError, wire.RemoteProtocolError, wire.ConnectTimeout)
_UNAVAILABLE = 503  # the answer of an engine that is shutting down


class _RoutedRequest:
    """One request and the replicas that were tried for it."""

    def __init__(self, replicas: Replicas, preferred: Replica | None, request: Any) -> None:
        self._replicas = replicas
        self._request = request
        self._preferred = preferred
        self._tokens = int(request.extensions.get(TOKENS, 1))
        self._tried: list[Replica] = []
        self._failure: Exception | None = None
        self.last_answer: Any = None

    def next_replica(self) -> Replica | None:
        """Return the next replica to try; None if no replica is left and the last answer must be used.

        Raises the last failure if no replica is left and there is no answer.
        """
        try:
            if len(self._tried) >= self._replicas.count:
                raise self._failure or self._replicas.none_left()
            replica = self._replicas.take(self._tokens, self._preferred, self._tried)
        except (EngineError, *_LOST) as error:
            if self.last_answer is not None:
                return None
            lost = self._failure or wire.ConnectError(str(error), request=self._request)
            raise lost from error
        self._tried.append(replica)
        return replica

    def addressed(self, replica: Replica) -> Any:
        """Return the request, addressed to ``replica``."""
        request, target = self._request, wire.URL(replica.url)
        headers = wire.Headers(request.headers)
        headers["host"] = target.netloc.decode()
        headers["authorization"] = f"Bearer {replica.api_key}"
        return wire.Request(
            request.method,
            request.url.copy_with(host=target.host, port=target.port),
            headers=headers,
            stream=request.stream,
            extensions=request.extensions,
        )

    @contextmanager
    def attempt(self, replica: Replica) -> Iterator["_Attempt"]:
        """Context of an attempt at ``replica``, which is released at the end.

        A lost connection is not raised; it marks the replica as down.
        """
        attempt = _Attempt(self, replica)
        try:
            yield attempt
        except _LOST as error:
            attempt.lost(error)
        finally:
            if not attempt.streams:
                attempt.release()

    def lost(self, replica: Replica, error: Exception) -> None:
        """Mark ``replica`` as down: it does not answer."""
        self._failure = error
        self._replicas.mark_down(replica, f"{replica.url} does not answer: {str(error) or type(error).__name__}")

    def unavailable(self, replica: Replica, response: Any) -> None:
        """Mark ``replica`` as down: it answered that it cannot serve."""
        self.last_answer = response
        self._replicas.mark_down(replica, f"{replica.url} answers {response.status_code}")

    def release(self, replica: Replica) -> None:
        """Release ``replica``: it no longer works on the request."""
        self._replicas.release(replica, self._tokens)


class _Attempt:
    """The request at one replica."""

    def __init__(self, routed: _RoutedRequest, replica: Replica) -> None:
        self._routed = routed
        self._replica = replica
        self.streams = False

    def lost(self, error: Exception) -> None:
        """Mark the replica as down: it does not answer."""
        self._routed.lost(self._replica, error)

    def release(self) -> None:
        """Release the replica: it no longer works on the request."""
        self._routed.release(self._replica)

    def pass_on(self, response: Any) -> Any:
        """Pass a streamed answer to the caller; the end of the stream releases the replica.

        A stream that has begun cannot be rerouted: if the replica is lost, the caller gets an incomplete stream.
        """
        self.streams = True
        stream = _RoutedStream(response.stream, self.release, self.lost)
        status, headers = response.status_code, response.headers
        return wire.Response(status, headers=headers, stream=stream, extensions=response.extensions)

    def accepts(self, response: Any) -> bool:
        """Whether the caller gets ``response``. False: the replica cannot serve, and another replica is tried."""
        if response.status_code != _UNAVAILABLE:
            return True
        self._routed.unavailable(self._replica, response)
        return False


class AsyncRouter(wire.AsyncBaseTransport):
    """Routes the requests of one client: to its replica, or to the least loaded one. ``inner`` sends them."""

    def __init__(self, inner: Any, replicas: Replicas) -> None:
        self._inner = inner
        self._replicas = replicas
        self._preferred: Replica | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request. An answer that is not streamed is read here; if it ends early, another replica is used."""
        if OTHER_ENGINE in request.extensions:
            return await self._inner.handle_async_request(request)
        await request.aread()
        routed = _RoutedRequest(self._replicas, self._preferred, request)
        while (replica := routed.next_replica()) is not None:
            self._preferred = replica
            with routed.attempt(replica) as attempt:
                response = await self._inner.handle_async_request(routed.addressed(replica))
                if _is_stream(response):
                    return attempt.pass_on(response)
                await response.aread()
                await response.aclose()
                if attempt.accepts(response):
                    return response
        return routed.last_answer


class SyncRouter(wire.BaseTransport):
    """Blocking counterpart of ``AsyncRouter``."""

    def __init__(self, inner: Any, replicas: Replicas) -> None:
        self._inner = inner
        self._replicas = replicas
        self._preferred: Replica | None = None

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def handle_request(self, request: Any) -> Any:
        """Send a request. An answer that is not streamed is read here; if it ends early, another replica is used."""
        if OTHER_ENGINE in request.extensions:
            return self._inner.handle_request(request)
        request.read()
        routed = _RoutedRequest(self._replicas, self._preferred, request)
        while (replica := routed.next_replica()) is not None:
            self._preferred = replica
            with routed.attempt(replica) as attempt:
                response = self._inner.handle_request(routed.addressed(replica))
                if _is_stream(response):
                    return attempt.pass_on(response)
                response.read()
                response.close()
                if attempt.accepts(response):
                    return response
        return routed.last_answer


def _is_stream(response: Any) -> bool:
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


class _RoutedStream(wire.AsyncByteStream, wire.SyncByteStream):
    """A streamed body that reports a lost connection, and releases its replica when it is closed."""

    def __init__(self, inner: Any, release: Callable[[], None], lost: Callable[[Exception], None]) -> None:
        self._inner = inner
        self._release = release
        self._lost = lost
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._inner
        except _LOST as error:
            self._lost(error)
            raise

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._inner:
                yield data
        except _LOST as error:
            self._lost(error)
            raise

    def close(self) -> None:
        self._done()
        self._inner.close()

    async def aclose(self) -> None:
        self._done()
        await self._inner.aclose()

    def _done(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()
