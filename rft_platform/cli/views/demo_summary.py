"""The last lines of ``rft demo`` and ``rft recipe``: tables, the same data as JSON, and the report's files."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.files import atomic_path, write_json, write_text
from rft_platform.config.home import Home
from rft_platform.recipes.recipe import Recipe, recipes
from rft_platform.recipes.report import RecipeReport, change, draw, markdown, report_of, shown
from rft_platform.run.console import table
from rft_platform.run.machine import machine_facts
from rft_platform.run.next_steps import model_uri
from rft_platform.run.round_lines import RoundLine, champion_notes, round_lines
from rft_platform.run.run_cost import DriveCost, drive_costs

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.rounds.project.project import Project


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run, from its starting policy to its last evaluated policy; None: the value was not measured."""

    project: str
    seed: int
    held_out_n: int  # number of held-out tasks
    held_out_pass_before: float | None  # of answers sampled at temperature 1.0, or as configured
    held_out_pass_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    rounds: list[RoundLine]  # without the starting policy
    wall_s: float  # of all drives
    cpu_s: float  # of the driver, the engine and the trainer in all drives
    model_version: str | None  # models:/NAME/VERSION of the last policy
    policy_version: int | None
    champion: str | None
    champion_notes: list[str]  # why the last policy is not the champion
    checkpoint: str | None  # Hugging Face folder of the last policy
    picture: Path | None

    def to_json(self) -> dict[str, Any]:
        """The summary as plain JSON values, with the properties of the machine."""
        return {
            **asdict(self),
            "picture": None if self.picture is None else str(self.picture),
            "machine": machine_facts(),
        }


def summary_of(project: "Project") -> Summary:
    """Build the summary from the project's notes and ledger."""
    lines = round_lines(project)
    measured = [line for line in lines if line.pass_rate_sampled is not None or line.pass_rate_greedy is not None]
    before = next((line for line in measured if line.round == 0), RoundLine(0))
    after = next((line for line in reversed(measured) if line.round > 0), RoundLine(0))
    last = next((line for line in reversed(lines) if line.policy_version is not None), RoundLine(0))
    champion = next((line for line in lines if line.champion), RoundLine(0))
    costs = drive_costs(project.home)
    picture = project.store.round_folder(after.round) / "learning_curve.png"
    return Summary(
        project=f"{project.config.project}/{project.config.name}",
        seed=project.config.seed,
        held_out_n=sum(len(dataset.tasks) for _, dataset in project.eval_tasks),
        held_out_pass_before=before.pass_rate_sampled,
        held_out_pass_after=after.pass_rate_sampled,
        greedy_before=before.pass_rate_greedy,
        greedy_after=after.pass_rate_greedy,
        rounds=[line for line in lines if line.round > 0],
        wall_s=sum(cost.wall_s for cost in costs),
        cpu_s=sum(cost.cpu_s for cost in costs),
        model_version=model_uri(project, last),
        policy_version=last.policy_version,
        champion=model_uri(project, champion),
        champion_notes=champion_notes(project, lines),
        checkpoint=last.checkpoint,
        picture=picture if picture.exists() else None,
    )


def write_summary(summary: Summary, file: Path) -> None:
    """Write the summary as JSON."""
    write_json(file.absolute(), summary.to_json())


def print_summary(summary: Summary, console: "Console") -> None:
    """Print the table, and the location of model, checkpoint and picture."""
    rates = table("held-out pass rate", "before", "after", left=["held-out pass rate"], title=summary.project)
    rates.add_row("sampled", _percent(summary.held_out_pass_before), _percent(summary.held_out_pass_after))
    rates.add_row("greedy", _percent(summary.greedy_before), _percent(summary.greedy_after))
    console.print(rates)
    model = summary.model_version or "not registered"
    facts = {
        "held-out problems": f"{summary.held_out_n:,}",
        "rounds": f"{len(summary.rounds):,}",
        "time": f"{summary.wall_s:,.1f} s wall, {summary.cpu_s:,.1f} s processor (driver, engine, trainer)",
        "model version": f"{model} (policy version {summary.policy_version})",
        "champion": _champion(summary),
        "checkpoint": summary.checkpoint or "none yet",
        "learning curve": str(summary.picture or "none yet"),
    }
    for name, value in facts.items():
        console.print(f"{name:<18} {value}", markup=False, soft_wrap=True)
        for note in summary.champion_notes if name == "champion" else ():
            console.print(f"{'':<18} {note}", markup=False, soft_wrap=True)


def _champion(summary: Summary) -> str:
    """The champion with its policy version and pass rate."""
    line = next((line for line in summary.rounds if line.champion), None)
    if line is None:
        return "none yet"
    rates = f"sampled {_percent(line.pass_rate_sampled)}, greedy {_percent(line.pass_rate_greedy)}"
    return f"{summary.champion} (policy version {line.policy_version}, {rates})"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


REPORT, PICTURE = "recipe_report.md", "recipe_report.png"


def print_recipes(console: "Console") -> None:
    """Print the name and the summary of each recipe that ``rft recipe`` trains."""
    for recipe in recipes().values():
        if recipe.figures:
            console.print(f"{recipe.name:<14} {recipe.summary}", markup=False, soft_wrap=True)


def write_report(project: "Project", recipe: Recipe, json_file: Path | None) -> RecipeReport | None:
    """Write the report and its picture into ``RFT_HOME``, and JSON if asked for; None before the first evaluation."""
    report = report_of(project, recipe, _stage_projects(project, recipe))
    if report is None:
        return None
    with atomic_path(project.home.root / PICTURE) as temp:
        temp.write_bytes(draw([report]))
    write_text(project.home.root / REPORT, markdown(report, PICTURE))
    if json_file is not None:
        costs = _costs(project, recipe)
        cost = {"wall_s": sum(each.wall_s for each in costs), "cpu_s": sum(each.cpu_s for each in costs)}
        write_json(json_file.absolute(), {**report.to_json(), **cost, "machine": machine_facts()})
    return report


def _stage_projects(project: "Project", recipe: Recipe) -> list["Project"]:
    from rft_platform.online.project import open_project

    return [open_project(Home(recipe.stage_home(project.home.root, stage))) for stage in recipe.evaluated]


def _costs(project: "Project", recipe: Recipe) -> list[DriveCost]:
    """All drives of the stages and of the project."""
    stages = [Home(recipe.stage_home(project.home.root, stage)) for stage in recipe.stages]
    return [cost for home in (*stages, project.home) for cost in drive_costs(home)]


def print_report(report: RecipeReport, recipe: Recipe, project: "Project", console: "Console") -> None:
    """Print the figures before and after training, beside the published ones, and where to read more."""
    title = f"{report.recipe}, seed {report.seed}: {report.held_out_tasks} held-out tasks"
    columns = (*report.ends, "change", *(("published", "change") if report.published_by else ()))
    figures = table("", *columns, left=[""], title=title)
    for curve in report.curves:
        share, ends = curve.figure.is_share, [end.mean for end in curve.ends]
        cells = [*(shown(end, share) for end in ends), change(ends[0], ends[-1], share)]
        if (published := curve.figure.published) is not None:
            cells += [" -> ".join(shown(end, share) for end in published), change(published[0], published[-1], share)]
        figures.add_row(curve.figure.label, *cells)
    console.print(figures)
    costs = _costs(project, recipe)
    wall_s, cpu_s = sum(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs)
    facts = {
        "time": f"{wall_s:,.1f} s wall, {cpu_s:,.1f} s processor (driver, engine, trainer)",
        "published by": report.published_by or "nobody",
        "report": str(project.home.root / REPORT),
    }
    for name, value in facts.items():
        console.print(f"{name:<14} {value}", markup=False, soft_wrap=True)
