"""Who may be sampled from when: requests pass the gate, pauses and weight updates close it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts the requests under way and holds back those that may not begin. For one event loop.

    A request that has passed keeps the weights it began with: an update waits until nothing is under way.
    """

    def __init__(self) -> None:
        self.paused = False
        self.busy_seconds = 0.0  # time with at least one request under way
        self._updating = False
        self._running = 0
        self._since = 0.0
        self._changed = asyncio.Condition()

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._running

    @asynccontextmanager
    async def request(self, control: bool = False) -> AsyncIterator[None]:
        """One request, begun as soon as neither a pause nor an update holds it; ``control``: pauses do not hold it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating and (control or not self.paused))
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            await asyncio.shield(self._tell())

    async def pause(self) -> None:
        """Hold what has not begun."""
        async with self._changed:
            self.paused = True

    async def resume(self) -> None:
        """Let through what was held."""
        async with self._changed:
            self.paused = False
            self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until nothing is under way, or until the pause is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0 or not self.paused)

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """The block runs alone: what is under way has finished, what comes waits, another update too."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._updating = True
            try:
                await self._changed.wait_for(lambda: self._running == 0)
            except BaseException:
                self._updating = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            self._updating = False
            await asyncio.shield(self._tell())

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if self._running:
            self.busy_seconds += now - self._since
        self._since = now
        self._running += change

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
