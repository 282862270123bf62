"""Progress reports of long work, through one logger for all displays: the CLI's live view, Dagster's event log, logs.

Working code calls ``report`` and ``announce``. Displays listen to the logger ``rft_platform.common.progress`` and read
``record.progress`` and ``record.announcement``. This module prints nothing.
"""

import logging
import time
from dataclasses import dataclass, field

LOGGER = logging.getLogger("rft_platform.common.progress")
_EVERY_S = 0.5
_last: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the work ``what``: ``done`` of ``total`` units, and numbers to watch.

    ``until`` names a condition that ends the work early; ``total`` is then a maximum. ``done`` 0 marks the start.
    """

    what: str
    done: int
    total: int
    numbers: dict[str, float] = field(default_factory=dict)
    until: str = ""

    def __str__(self) -> str:
        until = f" at most, until {self.until}" if self.until and self.done < self.total else ""
        return f"{self.what}: {self.done}/{self.total}{until}{self.watched}"

    @property
    def watched(self) -> str:
        """The numbers as text, each preceded by two spaces."""
        return "".join(f"  {name} {value:.4g}" for name, value in self.numbers.items())


def announce(line: str) -> None:
    """Report one event during the work as a separate line."""
    LOGGER.info("%s", line, extra={"announcement": line})


def report(what: str, done: int, total: int, until: str = "", /, **numbers: float) -> None:
    """Report the progress of ``what``: at most two reports per second, but always the last one (done == total).

    Report ``done`` 0 at the start of the work: durations are measured from there.
    """
    now = time.monotonic()
    if done < total and now - _last.get(what, 0.0) < _EVERY_S:
        return
    _last[what] = now
    if done >= total:
        _last.pop(what, None)
    progress = Progress(what, done, total, numbers, until)
    LOGGER.info("%s", progress, extra={"progress": progress})
