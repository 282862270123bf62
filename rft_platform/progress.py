"""Progress of long work, told once for everyone: the CLI's live view, Dagster's event log, plain lines.

Whoever works calls ``report``; whoever shows listens to the logger ``rft_platform.progress`` and reads
``record.progress`` and ``record.told``. Nothing is printed here.
"""

import logging
import time
from dataclasses import dataclass, field

LOGGER = logging.getLogger("rft_platform.progress")
_EVERY_S = 0.5
_last: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one piece of work has come: ``what`` names it, ``done`` of ``total`` units, numbers worth watching.

    ``until`` says what ends the work before ``total``, which then is a maximum. A report with ``done`` 0 is the start.
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
        """The numbers as text, with two spaces before each."""
        return "".join(f"  {name} {value:.4g}" for name, value in self.numbers.items())


def tell(line: str) -> None:
    """Tell something that happened on the way, once, in a line of its own."""
    LOGGER.info("%s", line, extra={"told": line})


def report(what: str, done: int, total: int, until: str = "", /, **numbers: float) -> None:
    """Tell how far ``what`` is. At most two a second for one ``what``; the last one (done == total) always.

    Report ``done`` 0 where the work starts: durations are measured from there.
    """
    now = time.monotonic()
    if done < total and now - _last.get(what, 0.0) < _EVERY_S:
        return
    _last[what] = now
    if done >= total:
        _last.pop(what, None)
    progress = Progress(what, done, total, numbers, until)
    LOGGER.info("%s", progress, extra={"progress": progress})
