"""The replicas of a pool: which of them serve, how much each has to do, and which takes what comes next."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rft_platform.errors import EngineError
from rft_platform.inference.shares import Share, divide

if TYPE_CHECKING:
    from rft_platform.inference.client import EngineClient

#: A run stays with its replica while no more than so many requests like its own wait there beyond the least loaded.
STICKY_REQUESTS = 2
AWAKE_S = 30.0  # a replica that got no work for so long is asked how it is: else its idle time-out might end it


@dataclass(eq=False, slots=True)
class Replica:
    """One process of a pool. A process that takes its place is another replica with the same number."""

    number: int
    client: "EngineClient"
    outstanding: int = 0  # tokens of the requests that it works on
    turn: int = 0  # when it was chosen last, counted in choices
    asked_at: float = 0.0  # the same in seconds of the monotonic clock

    @property
    def url(self) -> str:
        """Where it serves: ``http://host:port``."""
        return self.client.url

    @property
    def api_key(self) -> str:
        """The key of its OpenAI API."""
        return self.client.api_key


class Replicas:
    """The table of a pool's replicas; every method may be called from any thread.

    The least loaded takes what comes, in tokens that were asked for and have not come back; equals take turns.
    """

    def __init__(
        self, serving: Iterable[Replica], down: dict[int, str], on_down: Callable[[int], None] = lambda number: None
    ) -> None:
        """``down`` says why a number does not serve; ``on_down`` is told, off the lock, of each that goes down."""
        self.on_down = on_down
        self.on_quiet: Callable[[Replica], None] = lambda replica: None
        self._lock = threading.Lock()
        self._serving = {replica.number: replica for replica in serving}
        self._down = dict(down)
        self._turns = 0
        self.count = len(self._serving) + len(self._down)
        for replica in self._serving.values():
            replica.asked_at = time.monotonic()

    def serving(self) -> list[Replica]:
        """Those that serve, by number."""
        with self._lock:
            return [self._serving[number] for number in sorted(self._serving)]

    def down(self) -> dict[int, str]:
        """Why the others do not, by number."""
        with self._lock:
            return dict(self._down)

    def take(self, tokens: int, home: Replica | None = None, tried: Collection[Replica] = ()) -> Replica:
        """Who takes a request of ``tokens`` tokens: ``home`` unless it is clearly busier, else the least loaded.

        Give it back with ``give_back``. Raises EngineError, naming each, where none is left besides those ``tried``.
        """
        with self._lock:
            able = [replica for replica in self._serving.values() if replica not in tried]
            if not able:
                raise self._none_left()
            chosen = min(able, key=lambda replica: (replica.outstanding, replica.turn))
            if home in able and home is not None:
                stay = home.outstanding <= chosen.outstanding + STICKY_REQUESTS * tokens
                chosen = home if stay else chosen
            self._give(chosen, tokens)
            quiet = self._quiet()
        self._ask(quiet)
        return chosen

    def divide(self, costs: Sequence[int], rows: int, refused: Collection[Replica] = ()) -> list[tuple[Replica, Share]]:
        """Who takes which part of a batch whose items cost so many tokens; raises EngineError where none is left.

        ``rows`` are the sequences that an item stands for.
        """
        with self._lock:
            able = [replica for replica in self._serving.values() if replica not in refused]
            if not able:
                raise self._none_left()
            able.sort(key=lambda replica: (replica.outstanding, replica.turn))
            shares = divide(costs, rows, [replica.outstanding for replica in able])
            parts = list(zip(able, shares, strict=False))
            for replica, share in parts:
                self._give(replica, share.cost)
            quiet = self._quiet()
        self._ask(quiet)
        return parts

    def give_back(self, replica: Replica, tokens: int) -> None:
        """A request that ``replica`` took has been answered, or has failed."""
        with self._lock:
            replica.outstanding -= tokens

    def mark_down(self, replica: Replica, why: str) -> None:
        """``replica`` does not answer. A report about a process that was replaced meanwhile changes nothing."""
        with self._lock:
            known = self._serving.get(replica.number) is replica
            if known:
                del self._serving[replica.number]
                self._down[replica.number] = why
        if known:
            self.on_down(replica.number)

    def note(self, number: int, why: str) -> None:
        """Say anew why a replica that is down stays so."""
        with self._lock:
            if number in self._down:
                self._down[number] = why

    def join(self, replica: Replica) -> None:
        """``replica`` serves from now on."""
        with self._lock:
            self._down.pop(replica.number, None)
            replica.asked_at = time.monotonic()
            self._serving[replica.number] = replica

    def none_left(self) -> EngineError:
        """The error that says of each replica why it does not serve."""
        with self._lock:
            return self._none_left()

    def _give(self, replica: Replica, tokens: int) -> None:
        self._turns += 1
        replica.outstanding += tokens
        replica.turn, replica.asked_at = self._turns, time.monotonic()

    def _quiet(self) -> list[Replica]:
        now = time.monotonic()
        quiet = [replica for replica in self._serving.values() if now - replica.asked_at > AWAKE_S]
        for replica in quiet:
            replica.asked_at = now
        return quiet

    def _ask(self, quiet: list[Replica]) -> None:
        for replica in quiet:
            self.on_quiet(replica)

    def _none_left(self) -> EngineError:
        reasons = [f"replica {number}: {why}" for number, why in sorted(self._down.items())]
        reasons += [f"replica {number} at {self._serving[number].url}: refused" for number in sorted(self._serving)]
        return EngineError("no replica of the engine is left to answer: " + "; ".join(reasons))
