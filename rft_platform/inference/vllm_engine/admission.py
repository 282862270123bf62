"""Admission of requests to vLLM; pauses and weight updates hold new requests back."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

LOG = logging.getLogger(__name__)


class Admission:
    """Counts running requests and holds back requests that may not start. All callers must be in one event loop.

    A running request finishes on the weights that it started with, because an update waits until no request runs.
    """

    def __init__(self, wake: Callable[[], Awaitable[None]], end: Callable[[], None]) -> None:
        """``wake`` is called before a request or an update of an engine that sleeps.

        ``end`` is called if the engine can neither wake nor sleep again.
        """
        self.paused = False
        self.asleep = False
        self._wake, self._end = wake, end
        self._fall_asleep: Callable[[], Awaitable[None]] | None = None  # that of the last sleep
        self.busy_seconds = 0.0  # time with at least one running request
        self._updating = False
        self._running = 0
        self._since = 0.0
        self._changed = asyncio.Condition()

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._running

    @asynccontextmanager
    async def request(self, control: bool = False) -> AsyncIterator[None]:
        """Run the block as one request, once no pause or update holds it. Pauses do not hold ``control`` requests."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating and (control or not self.paused))
            await self._wake_up()
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            await asyncio.shield(self._tell())

    async def pause(self) -> None:
        """Hold requests that have not started."""
        async with self._changed:
            self.paused = True

    async def resume(self) -> None:
        """Release the held requests."""
        async with self._changed:
            self.paused = False
            self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until no request runs or the pause is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running == 0 or not self.paused)

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Run the block alone: wait for running requests, and hold new requests and other updates."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._updating = True
            try:
                await self._changed.wait_for(lambda: self._running == 0)
                await self._wake_up()
            except BaseException:
                self._updating = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            self._updating = False
            await asyncio.shield(self._tell())

    async def sleep(self, fall_asleep: Callable[[], Awaitable[None]]) -> None:
        """Call ``fall_asleep`` once no request runs, unless the engine sleeps already."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating and self._running == 0)
            if not self.asleep:
                await fall_asleep()
                self.asleep, self._fall_asleep = True, fall_asleep

    async def _wake_up(self) -> None:
        """Wake an engine that sleeps; the caller holds the condition, so that other callers wait for it."""
        if not self.asleep:
            return
        self.asleep = False  # also if the wake-up fails: it may have taken memory, which only a sleep frees
        try:
            await self._wake()
        except BaseException:  # an error, or the caller has disconnected
            await self._sleep_again()
            raise

    async def _sleep_again(self) -> None:
        """Free what a wake-up that failed has taken; end the engine if that fails, too."""
        assert self._fall_asleep is not None
        try:
            await self._fall_asleep()
            self.asleep = True
        except Exception:
            LOG.exception("the engine could neither wake nor sleep again, so it ends")
            self._end()

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if self._running:
            self.busy_seconds += now - self._since
        self._since = now
        self._running += change

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
