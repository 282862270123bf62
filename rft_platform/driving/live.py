"""Progress on the terminal: a live table of what is under way, or plain lines with the time where nobody watches."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rft_platform.progress import LOGGER, Progress

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.driving.live_table import LiveTable

_PACKAGE = logging.getLogger("rft_platform")
_PLAIN_EVERY_S = 5.0

#: Gives the lines that have become worth printing since it was asked last.
News = Callable[[], Iterable[str]]


@contextmanager
def showing_progress(console: "Console", news: News = tuple) -> Iterator[None]:
    """Show what is reported to ``rft_platform.progress`` while the block runs, news, and the package's warnings."""
    with _live(console) if console.is_terminal else _plain(console) as view:
        progress, warnings = ProgressHandler(view, news), WarningHandler(view)
        level = LOGGER.level
        LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(progress)
        _PACKAGE.addHandler(warnings)
        try:
            yield
        finally:
            LOGGER.removeHandler(progress)
            _PACKAGE.removeHandler(warnings)
            LOGGER.setLevel(level)
            progress.print_news()


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


class ProgressHandler(logging.Handler):
    """Hands reports to a view, and after each the news."""

    def __init__(self, view: "PlainLines | LiveTable", news: News) -> None:
        super().__init__()
        self._view = view
        self._news = news

    def emit(self, record: logging.LogRecord) -> None:
        """Show the report that ``record`` carries."""
        progress: Progress | None = getattr(record, "progress", None)
        if progress is not None:
            self.print_news()
            self._view.update(progress)
        told: str | None = getattr(record, "told", None)
        if told is not None:
            self._view.say(told)

    def print_news(self) -> None:
        """Show what is new."""
        for line in self._news():
            self._view.announce(line)


class WarningHandler(logging.Handler):
    """A line for each warning of the platform's own parts."""

    def __init__(self, view: "PlainLines | LiveTable") -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning."""
        self._view.say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _live(console: "Console") -> Iterator["LiveTable"]:
    from rft_platform.driving.live_table import LiveTable

    table = LiveTable(console)
    with table.bars:
        yield table


@contextmanager
def _plain(console: "Console") -> Iterator[PlainLines]:
    yield PlainLines(console)
