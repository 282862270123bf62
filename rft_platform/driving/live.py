"""Progress on the terminal: a live table of what is under way, or plain lines with the time where nobody watches."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rft_platform.observability.context import LOG as PHASES
from rft_platform.progress import LOGGER, Progress

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.driving.live_table import LiveTable

_PACKAGE = logging.getLogger("rft_platform")
_DRIVER = "rft_platform.jobs.driver"
_PLAIN_EVERY_S = 5.0

#: Gives the lines that have become worth printing since it was asked last.
News = Callable[[], Iterable[str]]


@contextmanager
def showing_progress(console: "Console", news: News = tuple) -> Iterator["Screen"]:
    """Show what is reported to ``rft_platform.progress`` while the block runs, news, and the package's warnings.

    Yields the screen: a caller that tells the last failure itself takes it back there.
    """
    with _live(console) if console.is_terminal else _plain(console) as view:
        screen = Screen(view, news)
        progress, warnings = ProgressHandler(screen), WarningHandler(screen)
        level = LOGGER.level
        LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(progress)
        _PACKAGE.addHandler(warnings)
        try:
            yield screen
        finally:
            LOGGER.removeHandler(progress)
            _PACKAGE.removeHandler(warnings)
            LOGGER.setLevel(level)
            screen.catch_up()


class PlainLines:
    """A line when a piece of work ends, and every few seconds while it lasts."""

    def __init__(self, console: "Console", every_s: float = _PLAIN_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def update(self, progress: Progress) -> None:
        """Take a report in; print it if it is time."""
        done = progress.done >= progress.total
        now = time.monotonic()
        if not done and now - self._last.setdefault(progress.what, now) < self._every_s:
            return
        self._last[progress.what] = now
        if done:
            del self._last[progress.what]
        self.say(str(progress))

    def announce(self, line: str) -> None:
        """Print the line of a round that is complete."""
        self.say(line)

    def say(self, line: str) -> None:
        """Print a line with the time before it."""
        self._console.print(f"{time.strftime('%H:%M:%S')}  {line}", markup=False, soft_wrap=True)


class Screen:
    """What the handlers share: a view, the news, and the failure of a phase that is held back.

    The failure is printed when something else happens. The driver's line about a retry names its cause, and so does
    the error that ends a command: those take it back, so that each failure is told once.
    """

    def __init__(self, view: "PlainLines | LiveTable", news: News) -> None:
        self.view = view
        self._news = news
        self._failure: str | None = None

    def catch_up(self) -> None:
        """Print what has happened so far: completed rounds, then the failure that is held."""
        for line in self._news():
            self.view.announce(line)
        if self._failure is not None:
            self.view.say(self._failure)
            self._failure = None

    def hold_failure(self, line: str) -> None:
        """Keep the line of a failed phase for later."""
        self.catch_up()
        self._failure = line

    def take_back_failure(self) -> None:
        """The failure that is held is told elsewhere."""
        self._failure = None


class ProgressHandler(logging.Handler):
    """Shows reports and remarks, after what has happened before them."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show the report that ``record`` carries."""
        progress: Progress | None = getattr(record, "progress", None)
        if progress is not None:
            self._screen.catch_up()
            self._screen.view.update(progress)
        told: str | None = getattr(record, "told", None)
        if told is not None:
            self._screen.view.say(told)


class WarningHandler(logging.Handler):
    """A line for each warning of the platform's own parts."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning, or hold the failure of a phase."""
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.name == PHASES.name and record.levelno >= logging.ERROR:
            self._screen.hold_failure(line)
            return
        if record.name == _DRIVER:
            self._screen.take_back_failure()
        self._screen.catch_up()
        self._screen.view.say(line)


@contextmanager
def _live(console: "Console") -> Iterator["LiveTable"]:
    from rft_platform.driving.live_table import LiveTable

    table = LiveTable(console)
    with table.bars:
        yield table


@contextmanager
def _plain(console: "Console") -> Iterator[PlainLines]:
    yield PlainLines(console)
