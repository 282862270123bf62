"""The replica table of a pool: which replicas are active, their load, and which replica takes the next request.

A batch is split so that each replica's share is a contiguous range of items, and the resulting loads are balanced.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from rft_platform.common.errors import EngineError

if TYPE_CHECKING:
    from rft_platform.inference.client import EngineClient

#: Each share of a batch has at least about this many sequences. A decode step of so few sequences takes hardly longer
#: than a step of one sequence, so smaller shares would not be faster.
ROWS_A_SHARE = 8
#: The calls of a run go to the same replica, unless its load exceeds the smallest load by more than this many requests
#: of the call's size.
STICKY_REQUESTS = 2
PROBE_AFTER_S = 30.0  # time without work after which a status request resets the replica's idle time-out


@dataclass(frozen=True, slots=True)
class Share:
    """Items ``start`` to ``stop`` (exclusive) of a batch, and their total cost in tokens."""

    start: int
    stop: int
    cost: int


def partition(costs: Sequence[int], rows: int, loads: Sequence[int]) -> list[Share]:
    """Return shares of the batch: one for each of the first engines of ``loads`` (in tokens, ascending).

    ``costs``: tokens of each item; ``rows``: sequences per item. ``ROWS_A_SHARE`` limits the number of shares. An item
    is never split, because the answers to one prompt share the prompt's computation.
    """
    useful = max(1, min(len(loads), len(costs), len(costs) * rows // ROWS_A_SHARE))
    targets = level(sum(costs), loads[:useful])
    ends = list(accumulate(costs, initial=0))
    shares, start, due = [], 0, 0.0
    for number, amount in enumerate(targets):
        due += amount
        stop = len(costs) if number == len(targets) - 1 else _cut(ends, due, start)
        if stop > start:
            shares.append(Share(start, stop, ends[stop] - ends[start]))
            start = stop
    return shares


def level(amount: float, loads: Sequence[int]) -> list[float]:
    """Distribute ``amount`` over the smallest ``loads`` (ascending) so that all loads that get a part become equal."""
    for count in range(len(loads), 0, -1):
        height = (amount + sum(loads[:count])) / count
        if height >= loads[count - 1]:
            return [height - load for load in loads[:count]]
    return [amount]


def _cut(ends: Sequence[int], due: float, start: int) -> int:
    """The item boundary nearest to ``due`` tokens from the start of the batch, not before ``start``."""
    return min(range(start, len(ends)), key=lambda place: abs(ends[place] - due))


@dataclass(eq=False, slots=True)
class Replica:
    """One process of a pool. The process that replaces it is another ``Replica`` with the same number."""

    number: int
    client: "EngineClient"
    outstanding: int = 0  # tokens of the replica's unfinished requests
    turn: int = 0  # number of the last choice that selected the replica
    used_at: float = 0.0  # monotonic time in seconds of the replica's last work or status request

    @property
    def url(self) -> str:
        """The address of the process: ``http://host:port``."""
        return self.client.url

    @property
    def api_key(self) -> str:
        """The key of the process's OpenAI API."""
        return self.client.api_key


class Replicas:
    """Thread-safe table of a pool's replicas.

    The least loaded replica, in tokens of unfinished requests, takes the next request. Equally loaded replicas take
    turns.
    """

    def __init__(self, serving: Iterable[Replica], down: dict[int, str]) -> None:
        """``down``: reason by replica number."""
        self.on_down: Callable[[int], None] = lambda number: None  # gets a replica's number, outside the lock
        self.on_idle: Callable[[Replica], None] = lambda replica: None
        self._lock = threading.Lock()
        self._serving = {replica.number: replica for replica in serving}
        self._down = dict(down)
        self._turns = 0
        self.count = len(self._serving) + len(self._down)
        for replica in self._serving.values():
            replica.used_at = time.monotonic()

    def serving(self) -> list[Replica]:
        """The active replicas, ordered by number."""
        with self._lock:
            return [self._serving[number] for number in sorted(self._serving)]

    def reset(self, serving: Iterable[Replica]) -> None:
        """Replace the table's contents by the active replicas ``serving``; no replica is down."""
        with self._lock:
            self._serving = {replica.number: replica for replica in serving}
            self._down = {}
            self.count = len(self._serving)

    def down(self) -> dict[int, str]:
        """The reason why a replica is down, by number, for each replica that is not active."""
        with self._lock:
            return dict(self._down)

    def take(self, tokens: int, preferred: Replica | None = None, tried: Collection[Replica] = ()) -> Replica:
        """Choose the replica for a request of ``tokens`` tokens: ``preferred`` unless it is much busier than others.

        Otherwise the least loaded replica. Call ``release`` when the request is done. Raises EngineError, naming each
        replica, if every active replica is in ``tried``.
        """
        with self._lock:
            able = [replica for replica in self._serving.values() if replica not in tried]
            if not able:
                raise self._none_left()
            chosen = min(able, key=lambda replica: (replica.outstanding, replica.turn))
            if preferred in able and preferred is not None:
                stay = preferred.outstanding <= chosen.outstanding + STICKY_REQUESTS * tokens
                chosen = preferred if stay else chosen
            self._add_load(chosen, tokens)
            idle = self._idle()
        self._report_idle(idle)
        return chosen

    def partition(
        self, costs: Sequence[int], rows: int, refused: Collection[Replica] = ()
    ) -> list[tuple[Replica, Share]]:
        """Divide a batch over the replicas not in ``refused``: each chosen replica with its share.

        ``costs``: tokens of each item; ``rows``: sequences per item. Raises EngineError if no replica is left.
        """
        with self._lock:
            able = [replica for replica in self._serving.values() if replica not in refused]
            if not able:
                raise self._none_left()
            able.sort(key=lambda replica: (replica.outstanding, replica.turn))
            shares = partition(costs, rows, [replica.outstanding for replica in able])
            parts = list(zip(able, shares, strict=False))
            for replica, share in parts:
                self._add_load(replica, share.cost)
            idle = self._idle()
        self._report_idle(idle)
        return parts

    def release(self, replica: Replica, tokens: int) -> None:
        """Subtract the ``tokens`` of a finished or failed request from the load of ``replica``."""
        with self._lock:
            replica.outstanding -= tokens

    def mark_down(self, replica: Replica, why: str) -> None:
        """Mark ``replica`` down. A report about a process that was already replaced changes nothing."""
        with self._lock:
            known = self._serving.get(replica.number) is replica
            if known:
                del self._serving[replica.number]
                self._down[replica.number] = why
        if known:
            self.on_down(replica.number)

    def set_down_reason(self, number: int, why: str) -> None:
        """Update the reason why a replica is down."""
        with self._lock:
            if number in self._down:
                self._down[number] = why

    @contextmanager
    def out_of_service(self, replica: Replica, least: int) -> Iterator[None]:
        """Give ``replica`` no new requests during the block.

        Raises EngineError unless at least ``least`` other replicas are active.
        """
        with self._lock:
            if self._serving.get(replica.number) is not replica:
                raise EngineError(f"replica {replica.number} is down")
            if len(self._serving) <= least:
                active = f"{len(self._serving)} of {self.count} replicas are active"
                raise EngineError(f"{active}: no replica can be updated while {least} others must serve")
            del self._serving[replica.number]
        try:
            yield
        finally:
            self.join(replica)

    def join(self, replica: Replica) -> None:
        """Make ``replica`` active."""
        with self._lock:
            self._down.pop(replica.number, None)
            replica.used_at = time.monotonic()
            self._serving[replica.number] = replica

    def none_left(self) -> EngineError:
        """The error that states, for each replica, why it does not serve."""
        with self._lock:
            return self._none_left()

    def _add_load(self, replica: Replica, tokens: int) -> None:
        self._turns += 1
        replica.outstanding += tokens
        replica.turn, replica.used_at = self._turns, time.monotonic()

    def _idle(self) -> list[Replica]:
        now = time.monotonic()
        idle = [replica for replica in self._serving.values() if now - replica.used_at > PROBE_AFTER_S]
        for replica in idle:
            replica.used_at = now
        return idle

    def _report_idle(self, idle: list[Replica]) -> None:
        for replica in idle:
            self.on_idle(replica)

    def _none_left(self) -> EngineError:
        reasons = [f"replica {number}: {why}" for number, why in sorted(self._down.items())]
        reasons += [f"replica {number} at {self._serving[number].url}: refused" for number in sorted(self._serving)]
        return EngineError("no replica of the engine is left to answer: " + "; ".join(reasons))
