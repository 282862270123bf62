"""Limits of one call, and of each caller's requests and tokens per minute and concurrent requests.

Each caller has a bucket that holds the requests of one minute and fills evenly, and another one for tokens. Callers are
the configured tenants, so memory does not grow with the traffic.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rft_platform.openai_api.messages import prompts_of

_TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BYTES_A_TOKEN = 4  # rough size of a token in a request
_MINUTE_S = 60.0
_BUSY_RETRY_S = 1


class CallLimitError(ValueError):
    """A field of a call is above its limit, or is no integer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The largest number of choices of a call, and of tokens of a choice."""

    most_choices: int
    most_tokens: int

    def apply(self, body: dict[str, Any], size: int) -> int:
        """Reduce the answer's length in ``body`` to the limit; return the tokens that the call may use, at most.

        ``size``: bytes of the request. Raises CallLimitError for too many choices or none.
        """
        prompts = len(prompts_of(body.get("prompt")))
        wanted = _integer(body, "n")
        if wanted is not None and wanted < 1:  # a negative one would add tokens to the caller's rate limit
            raise CallLimitError("n", f"{wanted}: expected at least 1")
        choices = prompts * (wanted or 1)
        if choices > self.most_choices:
            what = (
                f"{prompts} prompts with n={choices // prompts} are {choices} choices" if prompts > 1 else f"{choices}"
            )
            name = "n" if prompts == 1 else "prompt"
            raise CallLimitError(name, f"{what}; a request may have at most {self.most_choices} (service.most_choices)")
        given = {name: value for name in _TOKEN_FIELDS if (value := _integer(body, name)) is not None}
        body |= {name: min(value, self.most_tokens) for name, value in given.items()}
        longest = min(max(given.values(), default=self.most_tokens), self.most_tokens)
        return choices * max(0, longest) + size // _BYTES_A_TOKEN


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    """The integer of a field. Engines would also accept a text of digits, so other types are refused here."""
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise CallLimitError(name, f"{str(value)[:50]!r} is no integer")


class LimitExceededError(Exception):
    """A caller has used up its limit; the next request can succeed after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Bucket:
    """What a caller may use now, and when the bucket was last filled."""

    level: float
    filled_at: float


class _Rate:
    """A limit of units per minute, with a bucket for each caller."""

    def __init__(self, most: int, unit: str, clock: Callable[[], float]) -> None:
        self._most = most
        self._unit = unit
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, caller: str, units: float) -> float:
        """Take units, at most those of a minute; returns how many. Raises LimitExceededError if there are too few."""
        bucket, wanted = self._filled(caller), min(units, self._most)
        if bucket.level < wanted:
            wait_s = max(1, math.ceil((wanted - bucket.level) / self._most * _MINUTE_S))
            raise LimitExceededError(f"{self._most} {self._unit} a minute are the limit", wait_s)
        bucket.level -= wanted
        return wanted

    def put_back(self, caller: str, units: float) -> None:
        """Put back units; a negative number takes units that the bucket may not have, and later requests wait."""
        bucket = self._filled(caller)
        bucket.level = min(self._most, bucket.level + units)

    def _filled(self, caller: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(caller, _Bucket(self._most, now))
        bucket.level = min(self._most, bucket.level + (now - bucket.filled_at) * self._most / _MINUTE_S)
        bucket.filled_at = now
        return bucket


class RateLimits:
    """Admits requests by the name of their caller. Not thread-safe: only the event loop's thread may use it."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        concurrent_requests: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        tokens_per_minute: int | None = None,
    ) -> None:
        """A limit of None admits any number of requests."""
        self.refused = Counter[str]()  # requests since the start, by their caller
        self._requests = None if requests_per_minute is None else _Rate(requests_per_minute, "requests", clock)
        self._tokens = None if tokens_per_minute is None else _Rate(tokens_per_minute, "tokens", clock)
        self._concurrent = concurrent_requests
        self._open: Counter[str] = Counter()

    @contextmanager
    def admitted(self, caller: str) -> Iterator[None]:
        """Admit a request for as long as the context lasts. Raises LimitExceededError if a limit is reached."""
        if self._concurrent is not None and self._open[caller] >= self._concurrent:
            self.refused[caller] += 1
            raise LimitExceededError(f"{self._concurrent} requests at the same time are the limit", _BUSY_RETRY_S)
        self._take(self._requests, caller, 1)
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1

    def reserve_tokens(self, caller: str, tokens: int) -> float:
        """Take the tokens that a request may use; returns what ``settle_tokens`` needs.

        Raises LimitExceededError if the caller has too few. A request that may use more than a minute's tokens takes
        those of a minute.
        """
        return self._take(self._tokens, caller, tokens)

    def settle_tokens(self, caller: str, reserved: float, used: int) -> None:
        """Replace the tokens that were reserved for a request by those that it has used."""
        if self._tokens is not None:
            self._tokens.put_back(caller, reserved - used)

    def _take(self, rate: _Rate | None, caller: str, units: float) -> float:
        try:
            return 0.0 if rate is None else rate.take(caller, units)
        except LimitExceededError:
            self.refused[caller] += 1
            raise
