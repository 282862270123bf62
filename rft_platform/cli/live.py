"""Progress on the terminal: a live table of what is under way, or plain lines with the time where nobody watches."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rft_platform.progress import LOGGER, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_PACKAGE = logging.getLogger("rft_platform")
_PLAIN_EVERY_S = 5.0


@contextmanager
def showing_progress(console: "Console") -> Iterator[None]:
    """Show what is reported to ``rft_platform.progress`` while the block runs, and the package's warnings."""
    warnings = Warnings(console)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    _PACKAGE.addHandler(warnings)
    with _live(console) if console.is_terminal else _plain(console) as handler:
        LOGGER.addHandler(handler)
        try:
            yield
        finally:
            LOGGER.removeHandler(handler)
            _PACKAGE.removeHandler(warnings)
            LOGGER.setLevel(level)


def describe(progress: Progress) -> str:
    """The numbers of a report, for people."""
    return "  ".join(f"{name} {value:.4g}" for name, value in progress.numbers.items())


class Warnings(logging.Handler):
    """A line for each warning of the platform's own parts."""

    def __init__(self, console: "Console") -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning."""
        self._console.print(f"{record.levelname.lower()}: {record.getMessage()}", markup=False, soft_wrap=True)


class PlainLines(logging.Handler):
    """A line when a piece of work ends, and every few seconds while it lasts."""

    def __init__(self, console: "Console", every_s: float = _PLAIN_EVERY_S) -> None:
        super().__init__()
        self._console = console
        self._every_s = every_s
        self._last: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print the report that ``record`` carries, if it is time."""
        progress: Progress | None = getattr(record, "progress", None)
        if progress is None:
            return
        done = progress.done >= progress.total
        now = time.monotonic()
        if not done and now - self._last.setdefault(progress.what, now) < self._every_s:
            return
        self._last[progress.what] = now
        if done:
            del self._last[progress.what]
        self._console.print(f"{time.strftime('%H:%M:%S')}  {progress}", markup=False, soft_wrap=True)


class LiveTable(logging.Handler):
    """A row with a bar for each piece of work under way; what is done scrolls up as a line."""

    def __init__(self, console: "Console") -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("  [bold]{task.description:<22}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}", style="cyan"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self.bars.add_task("at work", total=None, numbers="")  # moves even where nobody reports, as at a start

    def emit(self, record: logging.LogRecord) -> None:
        """Bring the table up to the report that ``record`` carries."""
        progress: Progress | None = getattr(record, "progress", None)
        if progress is None:
            return
        numbers = describe(progress)
        if progress.what not in self._tasks:
            self._tasks[progress.what] = self.bars.add_task(progress.what, total=progress.total, numbers=numbers)
        task = self._tasks[progress.what]
        self.bars.update(task, completed=progress.done, total=progress.total, numbers=numbers)
        if progress.done >= progress.total:
            seconds = self.bars.tasks[self.bars.task_ids.index(task)].elapsed or 0.0
            self.bars.remove_task(self._tasks.pop(progress.what))
            self.bars.console.print(
                f"[green]✓[/] {progress.what:<22} {progress.total:>8,}  {seconds:6.1f} s  [cyan]{numbers}[/]"
            )


@contextmanager
def _live(console: "Console") -> Iterator[logging.Handler]:
    table = LiveTable(console)
    with table.bars:
        yield table


@contextmanager
def _plain(console: "Console") -> Iterator[logging.Handler]:
    yield PlainLines(console)
