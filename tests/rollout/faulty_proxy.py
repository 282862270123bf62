"""A real HTTP proxy in front of an engine that answers some requests with 500."""

import asyncio
import threading
from collections.abc import Callable


class FaultyProxy:
    """Forwards TCP to ``target``; every request head is shown to ``refuse``, which may ask for a 500 in its place."""

    def __init__(self, target: tuple[str, int], refuse: Callable[[], bool]) -> None:
        self._target, self._refuse = target, refuse
        self.refused = 0
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
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection: answers say ``connection: close``."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            body = await reader.readexactly(length)
            if b"/chat/completions" in head and self._refuse():
                self.refused += 1
                writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            else:
                lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
                up_reader, up_writer = await asyncio.open_connection(*self._target)
                up_writer.write(b"\r\n".join(lines) + b"\r\nconnection: close\r\n\r\n" + body)
                while data := await up_reader.read(65536):
                    writer.write(data)
                up_writer.close()
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
