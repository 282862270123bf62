"""The live table: a spinner, and a row with a progress bar for each running piece of work."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.table import Column
from rich.text import Text

from rft_platform.common import progress as reports


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

    def update(self, progress: reports.Progress) -> None:
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

    def _finish(self, progress: reports.Progress) -> None:
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


class _Bars(Progress):
    """A spinner above the rows of progress. It also moves without progress reports, e.g. while processes start."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The spinner, then the rows."""
        if not hasattr(self, "_spinner"):
            self._spinner = Spinner("dots", text="running; Ctrl-C stops it, the same command continues it")
        yield self._spinner
        yield self.make_tasks_table(self.tasks)
