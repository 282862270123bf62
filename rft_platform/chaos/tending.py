"""Supervisor thread of a chaos campaign: restarts ended processes, raises the budget, measures recovery times."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rft_platform.chaos.census import find
from rft_platform.chaos.moments import now, progress_mark
from rft_platform.chaos.records import Struck
from rft_platform.chaos.schedule import Mode
from rft_platform.chaos.supervised import Supervisor
from rft_platform.config.home import Home
from rft_platform.errors import RftError
from rft_platform.servers.leases import leases_of, stop, stop_strays

TEND_S = 0.1
_BYSTANDERS = ("webserver", "mlflow")  # rounds may continue without them: they have recovered when they answer
_QUIET_ROUNDS = 1  # rounds started and finished undisturbed after the last kill


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs of the harness, in seconds, and the number of rounds by which a budget grows."""

    moment_s: float  # until the planned moment of a kill
    victim_s: float  # until a process of the target's role runs
    recovery_s: float  # until the project makes progress
    end_s: float  # until the undisturbed end
    more_rounds: int  # at the start, and whenever a project would end before its kills
    fault_s: float = 240.0  # until the next file system fault strikes


LIMITS: dict[Mode, Limits] = {
    "driver": Limits(moment_s=20.0, victim_s=15.0, recovery_s=120.0, end_s=300.0, more_rounds=4),
    "daemon": Limits(moment_s=25.0, victim_s=45.0, recovery_s=240.0, end_s=600.0, more_rounds=2),
}


@contextmanager
def everything_ends(home: Home) -> Iterator[None]:
    """After the block, end the home's engine and trainer as `rft stop` does."""
    try:
        yield
    finally:
        for held in leases_of(home):
            stop(held)
        stop_strays(home)


class Tender:
    """A thread that restarts ended processes, raises the budget, and records the recovery time of each kill."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.more_rounds = LIMITS[supervisor.mode].more_rounds
        self.rounds = self.more_rounds
        self.error: Exception | None = None
        self._supervisor = supervisor
        self._waiting: list[tuple[Struck, float, tuple[int, int], frozenset[int]]] = []
        self._endless = True
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Tender":
        try:
            self._supervisor.start(self.rounds)
        except BaseException:
            self._supervisor.stop()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._supervisor.stop()

    def watch(self, struck: Struck, mark: tuple[int, int], before: frozenset[int]) -> None:
        """Measure the recovery time of a kill that was just performed.

        ``mark``: the progress before the kill. ``before``: the process ids that its target's role had.
        """
        with self._lock:
            self._waiting.append((struck, time.monotonic(), mark, before))

    def settled(self) -> bool:
        """Whether the project has recovered from every kill; raises RftError if the thread has failed."""
        if self.error is not None:
            raise RftError(f"the harness itself broke down: {self.error!r}") from self.error
        with self._lock:
            return not self._waiting

    def forget(self) -> list[Struck]:
        """Stop waiting for the outstanding recoveries; returns their kills."""
        with self._lock:
            given_up, self._waiting = [struck for struck, *_ in self._waiting], []
        return given_up

    def let_end(self) -> int:
        """Fix the budget at ``_QUIET_ROUNDS`` beyond the current round, or more if it was higher; returns it."""
        with self._lock:
            self._endless = False
            self.rounds = max(self.rounds, now(self._supervisor.home).round + _QUIET_ROUNDS)
            self._supervisor.start(self.rounds)
        return self.rounds

    def _run(self) -> None:
        while not self._stop.wait(TEND_S):
            with self._lock:
                try:
                    self._supervisor.tend()
                    if self._endless and self._supervisor.finished():
                        self.rounds += self.more_rounds
                        self._supervisor.start(self.rounds)
                    self._waiting = [entry for entry in self._waiting if not self._recovered(*entry)]
                except Exception as error:  # raised by ``settled``, in the harness's own thread
                    self.error = error
                    return

    def _recovered(self, struck: Struck, at: float, mark: tuple[int, int], before: frozenset[int]) -> bool:
        home, role = self._supervisor.home, struck.kill.target
        if role not in _BYSTANDERS and progress_mark(home) <= mark:
            return False
        if before and not any(successor.pid not in before for successor in find(home, role)):
            return False
        if not self._supervisor.serves(role):
            return False
        struck.recovery_s = round(time.monotonic() - at, 2)
        return True
