"""Output of ``rft eval --all`` and of a run in mode bench: one table with every policy of the project."""

from typing import TYPE_CHECKING

from rft_platform.run.console import notes, output, print_json

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project


def print_bench(project: "Project", as_json: bool = False) -> None:
    """Print the table of all policies, write it to the project's folder, and print the path."""
    from rich import box
    from rich.table import Table

    from rft_platform.rounds.reporting.bench import HEADER, bench_lines, bench_rows, write_bench

    lines, page = bench_lines(project), write_bench(project)
    if as_json:
        print_json({"policies": [line.to_json() for line in lines], "page": str(page)})
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name in HEADER[:2] else "right")
    for row in bench_rows(lines):
        table.add_row(*row)
    output().print(table)
    notes().print(f"as a page: {page}", markup=False, soft_wrap=True)
