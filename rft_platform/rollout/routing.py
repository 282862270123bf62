"""HTTP transports that send each request to one replica of a pool, and to another where that one does not answer.

Routing sits below recording, so a request that had to move is one call to the recorder and to the agent: its seed is
the same, so is its answer, and only the answer that came is recorded.

A run stays with the replica that it was given first (the least loaded then): each turn of an agent begins with all the
turns before it, which a replica that caches prefixes does not compute again. It moves when its replica is clearly
busier than another. The runs of one group are NOT held together: they share their first prompt alone, which costs one
prefill a replica, while a group on one replica would leave the others without work.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from rft_platform.errors import EngineError
from rft_platform.inference.replicas import Replica, Replicas
from rft_platform.rollout.wire import ELSEWHERE, TOKENS, wire

#: The connection broke, or none came about. Not a read that takes too long: elsewhere it would take as long again.
_LOST = (wire.NetworkError, wire.RemoteProtocolError, wire.ConnectTimeout)
_UNAVAILABLE = 503  # what an engine answers that is shutting down


class _Trip:
    """One request on its way through the replicas."""

    def __init__(self, replicas: Replicas, home: Replica | None, request: Any) -> None:
        self._replicas = replicas
        self._request = request
        self._home = home
        self._tokens = int(request.extensions.get(TOKENS, 1))
        self._tried: list[Replica] = []
        self._failure: Exception | None = None
        self.last_answer: Any = None

    def next_replica(self) -> Replica | None:
        """Who is tried next; None where the last answer must do. Raises the last failure where there is no answer."""
        try:
            if len(self._tried) >= self._replicas.count:
                raise self._failure or self._replicas.none_left()
            replica = self._replicas.take(self._tokens, self._home, self._tried)
        except (EngineError, *_LOST) as error:
            if self.last_answer is not None:
                return None
            lost = self._failure or wire.ConnectError(str(error), request=self._request)
            raise lost from error
        self._tried.append(replica)
        return replica

    def addressed(self, replica: Replica) -> Any:
        """The request, to ``replica``."""
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

    def lost(self, replica: Replica, error: Exception) -> None:
        """``replica`` does not answer."""
        self._failure = error
        self._replicas.mark_down(replica, f"{replica.url} does not answer: {error or type(error).__name__}")

    def unavailable(self, replica: Replica, response: Any) -> None:
        """``replica`` answers that it cannot serve."""
        self.last_answer = response
        self._replicas.mark_down(replica, f"{replica.url} answers {response.status_code}")

    def release(self, replica: Replica) -> None:
        """``replica`` has done its work on the request."""
        self._replicas.give_back(replica, self._tokens)


class AsyncRouter(wire.AsyncBaseTransport):
    """The requests of one client, each to the replica that has the least to do. Lies on top of ``inner``."""

    def __init__(self, inner: Any, replicas: Replicas) -> None:
        self._inner = inner
        self._replicas = replicas
        self._home: Replica | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; a whole answer is read here, so that one that breaks off is asked for again elsewhere."""
        if ELSEWHERE in request.extensions:
            return await self._inner.handle_async_request(request)
        await request.aread()
        trip = _Trip(self._replicas, self._home, request)
        while (replica := trip.next_replica()) is not None:
            self._home, streamed = replica, False
            try:
                response = await self._inner.handle_async_request(trip.addressed(replica))
                streamed = _is_stream(response)
                if streamed:
                    return _passed_on(response, trip, replica)
                await response.aread()
                await response.aclose()
            except _LOST as error:
                trip.lost(replica, error)
                continue
            finally:
                if not streamed:
                    trip.release(replica)
            if response.status_code != _UNAVAILABLE:
                return response
            trip.unavailable(replica, response)
        return trip.last_answer


class SyncRouter(wire.BaseTransport):
    """The same for the blocking client."""

    def __init__(self, inner: Any, replicas: Replicas) -> None:
        self._inner = inner
        self._replicas = replicas
        self._home: Replica | None = None

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

    def handle_request(self, request: Any) -> Any:
        """Send a request; a whole answer is read here, so that one that breaks off is asked for again elsewhere."""
        if ELSEWHERE in request.extensions:
            return self._inner.handle_request(request)
        request.read()
        trip = _Trip(self._replicas, self._home, request)
        while (replica := trip.next_replica()) is not None:
            self._home, streamed = replica, False
            try:
                response = self._inner.handle_request(trip.addressed(replica))
                streamed = _is_stream(response)
                if streamed:
                    return _passed_on(response, trip, replica)
                response.read()
                response.close()
            except _LOST as error:
                trip.lost(replica, error)
                continue
            finally:
                if not streamed:
                    trip.release(replica)
            if response.status_code != _UNAVAILABLE:
                return response
            trip.unavailable(replica, response)
        return trip.last_answer


def _is_stream(response: Any) -> bool:
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


def _passed_on(response: Any, trip: _Trip, replica: Replica) -> Any:
    """A streamed answer, whose end frees the replica. What has begun to arrive cannot move: it breaks off."""
    stream = _RoutedStream(response.stream, lambda: trip.release(replica), lambda error: trip.lost(replica, error))
    return wire.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


class _RoutedStream(wire.AsyncByteStream, wire.SyncByteStream):
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
