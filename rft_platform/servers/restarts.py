"""When a failed server or engine is started again, and the files in which a command reports its failing servers.

The first three restarts within ten minutes are immediate. Further ones wait, up to a minute, so that a server that ends
soon after each start does not take the processor time of the others. Nothing is given up: the cause (a full disk, a
database that is down) may end at any time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.files import read_json, write_json

_WITHIN_S = 600.0  # earlier failures do not count
AT_ONCE = 3  # restarts without a wait
_FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
_SUFFIX = ".failing.json"
_LONGEST_MESSAGE = 500  # characters
T = TypeVar("T")


def recent(failures: Sequence[float], now: float) -> list[float]:
    """The times of the failures that count."""
    return [at for at in failures if now - at < _WITHIN_S]


def wait_before_restart(failures: int) -> float:
    """Seconds to wait after this number of recent failures."""
    if failures <= AT_ONCE:
        return 0.0
    return float(min(_FIRST_WAIT_S * 2 ** (failures - AT_ONCE - 1), LONGEST_WAIT_S))


def report_failing(logs: Path, name: str, message: str) -> None:
    """Store why a server of this command is not running. ``failing_servers`` reads it, also in other processes."""
    write_json(logs / f"{name.lower()}{_SUFFIX}", {"at": time.time(), "message": message})


def report_running(logs: Path, name: str) -> None:
    """Remove the report of a server that runs again, or that its command has stopped."""
    (logs / f"{name.lower()}{_SUFFIX}").unlink(missing_ok=True)


def failing_servers(logs: Path) -> list[str]:
    """A message for each server that is failing; reports of a command that was killed expire."""
    found = []
    for file in sorted(logs.glob(f"*{_SUFFIX}")):
        try:
            report = read_json(file)
            if time.time() - report["at"] < _WITHIN_S:
                found.append(str(report["message"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # removed meanwhile, or damaged: the log has the message, too
    return found


class EngineStarts(Generic[T]):
    """Starts an engine, and waits longer after each failed start; any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: list[float] = []
        self._next_at = 0.0
        self.problem: str | None = None  #: why the engine does not run; None: its last start succeeded

    def attempt(self, start: Callable[[], T]) -> T:
        """What ``start`` returns. Raises EngineError without a start while the wait after a failed start lasts."""
        with self._lock:
            now = self._clock()
            if now < self._next_at:
                raise EngineError(f"{self.problem}; the next start is in {self._next_at - now:.0f} s")
            try:
                started = start()
            except (EngineError, UserError) as error:
                now = self._clock()
                self._failures = [*recent(self._failures, now), now]
                self._next_at = now + wait_before_restart(len(self._failures))
                reason = str(error).partition("\n")[0][:_LONGEST_MESSAGE]
                times = len(self._failures)
                self.problem = f"the engine could not be started {times} times in ten minutes: {reason}"
                raise
            self._failures, self.problem = [], None
            return started
