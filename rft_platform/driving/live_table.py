"""The live table: a spinner, and a row with a bar for each piece of work under way."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.text import Text

from rft_platform import progress as reports


class LiveTable:
    """Rows for what is under way; what is done scrolls up as a line. Use it inside ``with table.bars``."""

    def __init__(self, console: Console) -> None:
        self.bars = _Bars(
            TextColumn("  [bold]{task.description:<20}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}", style="cyan"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, progress: reports.Progress) -> None:
        """Bring the table up to a report."""
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in progress.numbers.items())
        if progress.what not in self._tasks:
            self._tasks[progress.what] = self.bars.add_task(progress.what, total=progress.total, numbers=numbers)
        task = self._tasks[progress.what]
        self.bars.update(task, completed=progress.done, total=progress.total, numbers=numbers)
        if progress.done >= progress.total:
            self._finish(progress, numbers)

    def announce(self, line: str) -> None:
        """Print the line of a round that is complete; work of it that ended short of its total is over."""
        for task in self._tasks.values():
            self.bars.remove_task(task)
        self._tasks.clear()
        self.bars.console.print(line, style="bold", markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.bars.console.print(line, markup=False, soft_wrap=True)

    def _finish(self, progress: reports.Progress, numbers: str) -> None:
        task = self._tasks.pop(progress.what)
        seconds = next(row.elapsed or 0.0 for row in self.bars.tasks if row.id == task)
        self.bars.remove_task(task)
        line = Text.assemble(
            ("✓ ", "green"), f"{progress.what:<20} {progress.total:>8,}  {seconds:6.1f} s  ", (numbers, "cyan")
        )
        self.bars.console.print(line, soft_wrap=True)


class _Bars(Progress):
    """The rows below a spinner, which moves even where nobody reports, as while processes start."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The spinner, then the rows."""
        if not hasattr(self, "_spinner"):
            self._spinner = Spinner("dots", text="at work; Ctrl-C interrupts in order")
        yield self._spinner
        yield self.make_tasks_table(self.tasks)
