"""Straggler handling: dynamic time-outs, and over-rollout (finish a batch without its slowest runs)."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.rollout.runs.run import Run

#: A dynamic time-out begins after this many successful attempts: the mean of fewer durations says little.
ENOUGH_ATTEMPTS = 8
#: Minimum of a dynamic time-out: shorter durations depend on the machine's load rather than on the run.
SHORTEST_S = 1.0


@dataclass(slots=True, eq=False)
class _Running:
    """A running attempt: its start on the event loop's clock, and its time-out."""

    started: float
    deadline: asyncio.Timeout


class Deadlines:
    """The time-outs of all running attempts. They are rescheduled when the mean duration changes."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._timeout_s, self._ratio = limits.timeout_s, limits.patience.dynamic_ratio
        self._running: set[_Running] = set()
        self._ended, self._seconds = 0, 0.0

    @property
    def limit_s(self) -> float:
        """Current time limit of an attempt, in seconds."""
        if self._ratio is None or self._ended < ENOUGH_ATTEMPTS:
            return self._timeout_s
        return min(self._timeout_s, max(SHORTEST_S, self._ratio * self._seconds / self._ended))

    def timeout_error(self) -> TimeoutError:
        """Error for an attempt that took too long. All such errors have the same text and count as one kind."""
        if self.limit_s == self._timeout_s:
            return TimeoutError(f"no result within {self._timeout_s:g} s")
        return TimeoutError(f"no result within {self._ratio:g} times the mean duration of an attempt (dynamic_timeout)")

    @contextmanager
    def attempt(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Keep ``deadline``, which the caller has entered, up to date while the body runs."""
        now = asyncio.get_running_loop().time
        running = _Running(now(), deadline)
        self._running.add(running)
        try:
            self._reschedule(running)
            yield
        finally:
            self._running.discard(running)

    def succeeded(self, seconds: float) -> None:
        """Count a successful attempt in the mean, and move the time-outs of the running ones."""
        self._ended, self._seconds = self._ended + 1, self._seconds + seconds
        if self._ratio is not None and self._ended >= ENOUGH_ATTEMPTS:
            for running in self._running:
                self._reschedule(running)

    def _reschedule(self, running: _Running) -> None:
        if not running.deadline.expired():
            running.deadline.reschedule(running.started + self.limit_s)


class TaskQuorum:
    """Counts tasks whose runs have all succeeded, and says when the batch may finish without the other tasks."""

    def __init__(self, runs: Sequence[Run], limits: RolloutLimits) -> None:
        self._missing = Counter(run.group_id for run in runs)
        self._complete = 0
        tasks = len(self._missing)
        over = limits.patience.over_ratio
        self._needed = max(1, math.ceil(tasks * (1.0 - over) - 1e-9)) if over > 0 else math.inf

    def add(self, run: Run) -> bool:
        """Count a successful run; return True if this run makes the number of complete tasks sufficient."""
        self._missing[run.group_id] -= 1
        if self._missing[run.group_id]:
            return False
        self._complete += 1
        return self._complete == self._needed
