"""A real HTTP proxy in front of an engine that answers some requests with 500."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress


class FaultyProxy:
    """Forwards TCP to ``target``; every request head is shown to ``refuse``, which may ask for a 500 in its place."""

    def __init__(self, target: tuple[str, int], refuse: Callable[[], bool]) -> None:
        self._target, self._refuse = target, refuse
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        under_way: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._pass_on(reader, writer))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: answers say ``connection: close``."""
        with suppress(OSError, asyncio.IncompleteReadError):
            async with _closed_after(writer):
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_content_length(head))
                if b"/chat/completions" in head and self._refuse():
                    writer.write(b"HTTP/1.1 500 Broken\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                else:
                    await self._forward(head, body, reader, writer)

    async def _forward(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Let the engine answer, until it has or the caller has gone."""
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        async with _closed_after(up_writer):
            lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
            up_writer.write(b"\r\n".join(lines) + b"\r\nconnection: close\r\n\r\n" + body)
            gone, answer = asyncio.ensure_future(reader.read()), asyncio.ensure_future(_copy(up_reader, writer))
            try:
                await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                answer.cancel()
                await asyncio.gather(gone, answer, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def _closed_after(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _content_length(head: bytes) -> int:
    lengths = (line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return int(next(lengths, 0))
