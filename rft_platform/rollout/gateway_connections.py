"""The gateway's connections to the engine: aiohttp's, below the same recorder and router as our clients' own.

Every call of every agent passes the gateway's one thread, of which httpcore, brought by the ``openai`` clients, would
take a quarter more time.
"""

import io
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from rft_platform.rollout.wire import wire

_IDLE_S = 3.0  # a connection is let go before servers hang up on it, which they do after 5 s at the earliest
_PIECE = 1 << 16  # bytes
_AT_ONCE = 1 << 20  # bytes; aiohttp warns of more, which would hold up all other calls


class GatewayConnections(wire.AsyncBaseTransport):
    """Connections of one run, for use in one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None  # made in the loop that uses it
        self._closed = False

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; raises the TransportError of ``wire`` that fits where no answer comes."""
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
        """The session, which sends what it is given and nothing of its own."""
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
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_wire_errors():
            async for piece in self._response.content.iter_chunked(_PIECE):
                yield piece

    async def aclose(self) -> None:
        self._response.release()  # closes the connection where the answer was not read to its end


def _timeout(seconds: dict[str, float | None]) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(
        total=None, connect=seconds.get("pool"), sock_connect=seconds.get("connect"), sock_read=seconds.get("read")
    )


@contextmanager
def _as_wire_errors() -> Iterator[None]:
    """The router and the recorder know the errors of the HTTP package below ``openai`` alone."""
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
