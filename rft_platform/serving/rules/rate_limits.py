"""Limit each caller's requests per minute and concurrent requests.

Each caller has a token bucket that holds the requests of one minute and fills evenly. Callers are the configured
tenants, so memory does not grow with the traffic.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MINUTE_S = 60.0
_BUSY_RETRY_S = 1


class LimitExceededError(Exception):
    """A caller has used up its limit; the next request can succeed after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Bucket:
    """The token bucket of a caller: the requests that it may send now, and when the bucket was last filled."""

    requests: float
    filled_at: float


class RateLimits:
    """Admits requests by the name of their caller. Not thread-safe: only the event loop's thread may use it."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        concurrent_requests: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A limit of None admits any number of requests."""
        self.refused = 0  # requests since the start
        self._rate = requests_per_minute
        self._concurrent = concurrent_requests
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._open: Counter[str] = Counter()

    @contextmanager
    def admitted(self, caller: str) -> Iterator[None]:
        """Admit a request for as long as the context lasts. Raises LimitExceededError if a limit is reached."""
        if self._concurrent is not None and self._open[caller] >= self._concurrent:
            self.refused += 1
            raise LimitExceededError(f"{self._concurrent} requests at the same time are the limit", _BUSY_RETRY_S)
        self._take(caller)
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1

    def _take(self, caller: str) -> None:
        if self._rate is None:
            return
        now, a_second = self._clock(), self._rate / _MINUTE_S
        bucket = self._buckets.setdefault(caller, _Bucket(self._rate, now))
        bucket.requests = min(self._rate, bucket.requests + (now - bucket.filled_at) * a_second)
        bucket.filled_at = now
        if bucket.requests < 1:
            self.refused += 1
            wait_s = max(1, math.ceil((1 - bucket.requests) / a_second))
            raise LimitExceededError(f"{self._rate} requests a minute are the limit", wait_s)
        bucket.requests -= 1
