"""The end of ``rft recipe``: the table of figures, and the report's files in ``RFT_HOME``."""

from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.files import atomic_path, write_json, write_text
from rft_platform.recipes.recipe import Recipe, recipes
from rft_platform.recipes.report import ENDS, RecipeReport, change, draw, markdown, report_of, shown
from rft_platform.run.machine import machine_facts
from rft_platform.run.run_cost import drive_costs

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.rounds.project.project import Project

REPORT, PICTURE = "recipe_report.md", "recipe_report.png"


def print_recipes(console: "Console") -> None:
    """Print the name and the summary of each recipe that ``rft recipe`` trains."""
    for recipe in recipes().values():
        if recipe.figures:
            console.print(f"{recipe.name:<14} {recipe.summary}", markup=False, soft_wrap=True)


def write_report(project: "Project", recipe: Recipe, json_file: Path | None) -> RecipeReport | None:
    """Write the report and its picture into ``RFT_HOME``, and JSON if asked for; None before the first evaluation."""
    report = report_of(project, recipe)
    if report is None:
        return None
    with atomic_path(project.home.root / PICTURE) as temp:
        temp.write_bytes(draw([report]))
    write_text(project.home.root / REPORT, markdown(report, PICTURE))
    if json_file is not None:
        costs = drive_costs(project.home)
        cost = {"wall_s": sum(each.wall_s for each in costs), "cpu_s": sum(each.cpu_s for each in costs)}
        write_json(json_file.absolute(), {**report.to_json(), **cost, "machine": machine_facts()})
    return report


def print_report(report: RecipeReport, project: "Project", console: "Console") -> None:
    """Print the figures before and after training, beside the published ones, and where to read more."""
    from rich import box
    from rich.table import Table

    title = f"{report.recipe}, seed {report.seed}: {report.held_out_tasks} held-out tasks"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    for name in (*ENDS, "change", *(("published", "change") if report.published_by else ())):
        table.add_column(name, justify="right")
    for curve in report.curves:
        share, ends = curve.figure.is_share, [end.mean for end in curve.ends]
        cells = [*(shown(end, share) for end in ends), change(ends[0], ends[-1], share)]
        if (published := curve.figure.published) is not None:
            cells += [" -> ".join(shown(end, share) for end in published), change(published[0], published[-1], share)]
        table.add_row(curve.figure.label, *cells)
    console.print(table)
    costs = drive_costs(project.home)
    wall_s, cpu_s = sum(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs)
    facts = {
        "time": f"{wall_s:,.1f} s wall, {cpu_s:,.1f} s processor (driver, engine, trainer)",
        "published by": report.published_by or "nobody",
        "report": str(project.home.root / REPORT),
    }
    for name, value in facts.items():
        console.print(f"{name:<14} {value}", markup=False, soft_wrap=True)
