"""Progress on the terminal: a live table of running work, or time-stamped plain lines if it is not a terminal."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.spinner import Spinner
from rich.table import Column
from rich.text import Text

from rft_platform.common.progress import LOGGER, Progress
from rft_platform.observability.log_context import LOG as PHASES
from rft_platform.observability.log_context import open_phases

_PACKAGE = logging.getLogger("rft_platform")
_DRIVER = "rft_platform.run.driver"
_PLAIN_EVERY_S = 5.0
_SILENT_S = 30.0  # longest time without a printed line if the output is not a terminal
_BEAT_S = 1.0

#: Returns the lines that became ready for printing since its last call.
News = Callable[[], Iterable[str]]


@contextmanager
def showing_progress(console: Console, news: News = tuple) -> Iterator["Screen"]:
    """During the block, show the reports to ``rft_platform.common.progress``, the news, and the package's warnings.

    Yields the screen. A caller that prints the last failure itself calls ``take_back_failure`` of the screen.
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
    """Prints a line when a piece of work ends, and every few seconds while it runs.

    The start of work is printed, too, if nothing else was printed for a few seconds.

    After ``silent_s`` seconds without a line it prints which work is still running.
    """

    def __init__(self, console: Console, every_s: float = _PLAIN_EVERY_S, silent_s: float = _SILENT_S) -> None:
        self._console = console
        self._every_s = every_s
        self._silent_s = silent_s
        self._last: dict[str, float] = {}
        self._newest = ""  # the newest report of unfinished work
        self._newest_phases = open_phases()  # phases open at that report; compared, as work may end below its total
        self._said_at = self._news_at = time.monotonic()

    def update(self, progress: Progress) -> None:
        """Record a progress report; print it if the work has ended or enough time has passed since the last line."""
        done = progress.done >= progress.total
        now = time.monotonic()
        self._newest, self._newest_phases = "" if done else str(progress), open_phases()
        if not done and now - self._last.setdefault(progress.what, self._said_at) < self._every_s:
            return
        self._last[progress.what] = now
        if done:
            del self._last[progress.what]
        self.say(str(progress))

    def announce(self, line: str) -> None:
        """Print the line of a completed round."""
        self.say(line)

    def say(self, line: str) -> None:
        """Print a line with a time stamp."""
        self._news_at = time.monotonic()
        self._print(line)

    def beat(self) -> None:
        """Print which work is running if nothing was printed for a long time; called about once a second."""
        now = time.monotonic()
        if now - self._said_at < self._silent_s:
            return
        phases = open_phases()
        newest = self._newest if phases == self._newest_phases else ""
        running = newest or ", ".join(map(str, phases))
        if running:
            self._print(f"still running: {running} (no news for {now - self._news_at:.0f} s)")

    def _print(self, line: str) -> None:
        self._said_at = time.monotonic()
        self._console.print(f"{time.strftime('%H:%M:%S')}  {line}", markup=False, soft_wrap=True)


class LiveTable:
    """Shows a row for each running piece of work; finished work is a line above. Use it inside ``with table.bars``."""

    def __init__(self, console: Console) -> None:
        self.bars = _Bars(
            TextColumn("  [bold]{task.description:<20}", table_column=_one_line()),
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=_one_line()),
            TimeElapsedColumn(table_column=_one_line()),
            _Remaining(table_column=_one_line()),
            TextColumn("{task.fields[numbers]}", style="cyan", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, progress: Progress) -> None:
        """Update the table from a progress report."""
        task = self._tasks.get(progress.what)
        if task is None:
            task = self.bars.add_task(progress.what, total=progress.total, numbers="", until="")
            self._tasks[progress.what] = task
        until = f"until {progress.until}" if progress.until else ""
        numbers = "  ".join(part for part in (until, progress.watched.strip()) if part)
        self.bars.update(
            task, completed=progress.done, total=progress.total, numbers=numbers, until=bool(progress.until)
        )
        if progress.done >= progress.total:
            self._finish(progress)

    def announce(self, line: str) -> None:
        """Print the line of a completed round and clear the table; work still in the table ended below its total."""
        for task in self._tasks.values():
            self.bars.remove_task(task)
        self._tasks.clear()
        self.bars.console.print(line, style="bold", markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.bars.console.print(line, markup=False, soft_wrap=True)

    def _finish(self, progress: Progress) -> None:
        task = self._tasks.pop(progress.what)
        seconds = next(row.elapsed or 0.0 for row in self.bars.tasks if row.id == task)
        self.bars.remove_task(task)
        line = Text.assemble(
            ("✓ ", "green"), f"{progress.what:<20} {progress.total:>8,}  {seconds:6.1f} s", (progress.watched, "cyan")
        )
        self.bars.console.print(line, soft_wrap=True)


def _one_line() -> Column:
    """A column without line breaks; a narrow terminal cuts the numbers at the end of the row."""
    return Column(no_wrap=True)


class _Remaining(TimeRemainingColumn):
    """The estimated remaining time; an upper bound for work that may end earlier."""

    def render(self, task: Task) -> Text:
        """``0:01:20 left``, ``at most 0:01:20 left``, or nothing without an estimate."""
        if task.time_remaining is None:
            return Text("")
        return Text.assemble("at most " if task.fields["until"] else "", super().render(task), " left")


class _Bars(Bars):
    """A spinner above the rows of progress. It also moves without progress reports, e.g. while processes start."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The spinner, then the rows."""
        if not hasattr(self, "_spinner"):
            self._spinner = Spinner("dots", text="running; Ctrl-C stops it, the same command continues it")
        yield self._spinner
        yield self.make_tasks_table(self.tasks)


class Screen:
    """Shared by the log handlers: a view, the news, and the pending message about a failed stage.

    The pending failure is printed before the next other output. It is discarded if the driver's line about a retry, or
    the error that ends a command, comes first: both name the same cause, so that each failure is printed once.
    """

    def __init__(self, view: PlainLines | LiveTable, news: News) -> None:
        self.view = view
        self._news = news
        self._failure: str | None = None

    def catch_up(self) -> None:
        """Print everything so far: completed rounds, then the pending failure."""
        for line in self._news():
            self.view.announce(line)
        if self._failure is not None:
            self.view.say(self._failure)
            self._failure = None

    def hold_failure(self, line: str) -> None:
        """Store the line of a failed stage as the pending failure."""
        self.catch_up()
        self._failure = line

    def take_back_failure(self) -> None:
        """Discard the pending failure, because it is printed elsewhere."""
        self._failure = None


class ProgressHandler(logging.Handler):
    """Shows progress reports and notes, after the output that was pending before them."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Show the report in ``record``."""
        progress: Progress | None = getattr(record, "progress", None)
        if progress is not None:
            self._screen.catch_up()
            self._screen.view.update(progress)
        announcement: str | None = getattr(record, "announcement", None)
        if announcement is not None:
            self._screen.view.say(announcement)


class WarningHandler(logging.Handler):
    """Prints a line for each warning of the platform's own modules."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning, or hold back the failure of a stage."""
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.name == PHASES.name and record.levelno >= logging.ERROR:
            self._screen.hold_failure(line)
            return
        if record.name == _DRIVER:
            self._screen.take_back_failure()
        self._screen.catch_up()
        self._screen.view.say(line)


@contextmanager
def _live(console: Console) -> Iterator[LiveTable]:
    table = LiveTable(console)
    with table.bars:
        yield table


@contextmanager
def _plain(console: Console) -> Iterator[PlainLines]:
    lines, ended = PlainLines(console), threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            lines.beat()

    thread = threading.Thread(target=beat, name="progress-beat", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()
