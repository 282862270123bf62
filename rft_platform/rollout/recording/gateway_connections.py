"""The gateway's connections to the engine, made with aiohttp instead of httpcore, which the ``openai`` clients use.

All calls of all agents pass through the gateway's single thread; with httpcore each call takes a quarter more of this
thread's time. Recorder and router are those of our own clients.
"""

import io
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from rft_platform.rollout.recording.httpx_compat import wire

_IDLE_S = 3.0  # close idle connections before the server does (after 5 s or more)
_PIECE = 1 << 16  # bytes
_AT_ONCE = 1 << 20  # bytes; aiohttp warns of larger bodies, which block all other calls


class GatewayConnections(wire.AsyncBaseTransport):
    """Connections of one run, for use in one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None  # created in the loop that uses it
        self._closed = False

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; raises the matching TransportError of ``wire`` if no answer comes."""
        content = await request.aread()
        with _as_wire_errors():
            response = await self._open_session().request(
                request.method,
                str(request.url),
                headers=request.headers.multi_items(),
                data=(content or None) if len(content) <= _AT_ONCE else io.BytesIO(content),
                timeout=_timeout(request.extensions.get("timeout") or {}),
                allow_redirects=False,
            )
        return wire.Response(response.status, headers=response.raw_headers, stream=_AnswerStream(response))

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session, which adds no headers to a request."""
        if self._closed:
            raise wire.ConnectError("the run has ended")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
                auto_decompress=False,
            )
        return self._session

    async def aclose(self) -> None:
        """Close the connections."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


class _AnswerStream(wire.AsyncByteStream):
    """The body of an aiohttp response as a stream of the OpenAI client's HTTP library."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_wire_errors():
            async for piece in self._response.content.iter_chunked(_PIECE):
                yield piece

    async def aclose(self) -> None:
        self._response.release()  # closes the connection if the answer was not read to its end


def _timeout(seconds: dict[str, float | None]) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=None, connect=seconds.get("pool"), sock_connect=seconds.get("connect"), sock_read=seconds.get("read")
    )


@contextmanager
def _as_wire_errors() -> Iterator[None]:
    """Convert aiohttp errors to those of ``wire``, the only ones that the router and the recorder know."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
        kind = wire.ConnectTimeout if isinstance(error, TimeoutError) else wire.ConnectError
        raise kind(str(error)) from error
    except TimeoutError as error:
        raise wire.ReadTimeout(str(error)) from error
    except aiohttp.ClientPayloadError as error:
        raise wire.RemoteProtocolError(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise wire.ReadError(f"{type(error).__name__}: {error}") from error
