"""Threads of the service that only read the database, so that a slow query delays no write."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rft_platform.online.traffic.database import DatabaseUnavailableError, answering

T = TypeVar("T")

_THREADS = 2  # a call that did not answer in time keeps its thread


class TrafficReader:
    """Runs functions that only read the database; writes do not wait for these functions."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="traffic-reader")

    async def run(self, work: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Call ``work``; raises DatabaseUnavailableError if the database does not answer within ``timeout_s``."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._pool.submit(answering()(work))), timeout_s)
        except TimeoutError:
            raise DatabaseUnavailableError(f"the database did not answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Start no further function."""
        self._pool.shutdown(wait=False, cancel_futures=True)
