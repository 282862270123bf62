"""What router and recorder rely on in the HTTP transports below them, those of ``openai`` clients and of gateways."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rft_platform.rollout.recording.httpx_compat import many_connections, wire

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
KINDS = [wire.AsyncHTTPTransport, many_connections]
LARGE = 3_000_000  # bytes: more than is sent in one go
LOST = (wire.NetworkError, wire.RemoteProtocolError)  # for which a request goes to another replica


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that treats each connection by ``handler``, which gets the number of earlier ones."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            await handler(reader, writer, connections - 1)
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2 * LARGE)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        listening.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))


def answer(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)


def request(url: str, content: bytes = b"{}", read_s: float = 20) -> Any:
    timeout = {"connect": 5.0, "read": read_s, "write": 5.0, "pool": 5.0}
    return wire.Request("POST", url, content=content, extensions={"timeout": timeout})


async def send(connections: Any, asked: Any) -> bytes:
    response = await connections.handle_async_request(asked)
    assert response.status_code == 200
    content: bytes = await response.aread()
    await response.aclose()
    return content


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
async def connections(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    made = request.param()
    yield made
    await made.aclose()


async def test_a_large_request_arrives_whole(connections: Any) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(answer(str(len(await read_request(reader))).encode()))

    async with server(count) as url:
        assert await send(connections, request(url, b"x" * LARGE)) == str(LARGE).encode()


async def test_nothing_is_sent_but_what_was_given(connections: Any) -> None:
    heads = []

    async def remember(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for _ in range(2):
            heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
            await reader.readexactly(2)
            writer.write(answer(b"{}").replace(b"\r\n", b"\r\nset-cookie: a=b\r\n", 1))

    async with server(remember) as url:
        for _ in range(2):
            await send(connections, request(url))
    names = [{line.partition(":")[0] for line in head.split("\r\n")[1:] if line} for head in heads]
    assert names == [{"host", "content-length"}] * 2


async def test_streamed_pieces_arrive_as_they_are_sent(connections: Any) -> None:
    go_on = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with server(stream) as url:
        response = await connections.handle_async_request(request(url))
        pieces = []
        async for piece in response.stream:
            pieces.append(piece)
            go_on.set()
        await response.aclose()
    assert pieces == [b"one", b"two"]


async def test_a_port_without_a_listener_is_a_connect_error(connections: Any) -> None:
    async with server(lambda *_: asyncio.sleep(0)) as url:
        pass
    with pytest.raises(wire.ConnectError):
        await send(connections, request(url))


async def test_a_server_that_hangs_up_is_lost(connections: Any) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)

    async with server(hang_up) as url:
        with pytest.raises(LOST):
            await send(connections, request(url))


async def test_an_answer_that_breaks_off_is_lost(connections: Any) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(answer(b"half an answer")[:-6])

    async with server(break_off) as url:
        with pytest.raises(LOST):
            await send(connections, request(url))


async def test_silence_is_a_read_timeout_and_no_loss(connections: Any) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        await reader.read()  # until the client goes away

    async with server(say_nothing) as url:
        with pytest.raises(wire.ReadTimeout):
            await send(connections, request(url, read_s=0.2))


async def test_an_idle_connection_that_was_closed_is_not_used_again(connections: Any) -> None:
    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await read_request(reader)
        writer.write(answer(str(number).encode()))

    async with server(one_each) as url:
        for number in range(3):
            assert await send(connections, request(url)) == str(number).encode()
            await asyncio.sleep(0.05)  # the end of the connection is known


async def test_a_connection_serves_one_call_after_the_other(connections: Any) -> None:
    async def all_on_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for _ in range(3):
            await read_request(reader)
            writer.write(answer(str(number).encode()))

    async with server(all_on_one) as url:
        assert [await send(connections, request(url)) for _ in range(3)] == [b"0"] * 3
