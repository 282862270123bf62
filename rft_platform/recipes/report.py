"""The report of a recipe: its figures before and after training, their curves, and transcripts to read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rft_platform.evaluation.plots import png_of
from rft_platform.evaluation.results import EvaluationResult, Transcript
from rft_platform.experience.record import REWARD_ROUNDING
from rft_platform.recipes.recipe import Figure
from rft_platform.rounds.reporting.round_history import evaluation_of

if TYPE_CHECKING:
    from rft_platform.recipes.recipe import Recipe
    from rft_platform.rounds.project.project import Project

ENDS = ("before", "after")
LAST = "RL"  # the training after the stages
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Value:
    """A figure on the held-out tasks after a round, with its 95 % interval over tasks (normal approximation)."""

    round: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class FigureCurve:
    """A figure of a recipe after every round that was evaluated; round 0 is the start.

    Stages before the one that round 0 starts from have negative rounds.
    """

    figure: Figure
    values: list[Value]

    @property
    def ends(self) -> list[Value]:
        """After each stage and after the rounds; without stages: before and after the rounds."""
        return [*(value for value in self.values if value.round <= 0), self.values[-1]]


@dataclass(frozen=True, slots=True)
class RecipeReport:
    """What a project of a recipe has reached so far."""

    recipe: str
    seed: int
    held_out_tasks: int
    published_by: str
    ends: list[str]  # names of ``FigureCurve.ends``
    curves: list[FigureCurve]
    before: list[Transcript]  # of the warm-started policy: the first failed and the first passed run that were kept
    after: list[Transcript]  # of the last evaluated policy, chosen in the same way

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RecipeReport":
        """The report that ``to_json`` converted; further keys are ignored."""
        curves = [
            FigureCurve(Figure(**curve["figure"]), [Value(**each) for each in curve["values"]])
            for curve in value["curves"]
        ]
        known = {name: value[name] for name in ("recipe", "seed", "held_out_tasks", "published_by")}
        before, after = ([Transcript(**each) for each in value[side]] for side in ("before", "after"))
        return cls(**known, ends=value.get("ends", list(ENDS)), curves=curves, before=before, after=after)


def report_of(project: "Project", recipe: "Recipe", stages: Sequence["Project"] = ()) -> RecipeReport | None:
    """The report of a project of the recipe; None before its first evaluation.

    ``stages`` are the projects of the recipe's evaluated stages, in order.
    """
    found = _evaluations(project)
    if not found:
        return None
    for back, stage in enumerate(reversed(stages), 1):
        found.insert(0, replace(_evaluations(stage)[-1], round=-back))
    curves = [FigureCurve(figure, values) for figure in recipe.figures if (values := _values(found, figure))]
    first, last = found[0], found[-1]
    return RecipeReport(
        recipe.name,
        project.config.seed,
        last.tasks,
        recipe.published_by,
        [*(stage.upper() for stage in recipe.stages[-len(stages) - 1 :]), LAST] if stages else list(ENDS),
        curves,
        _chosen(first),
        _chosen(last),
    )


def markdown(report: RecipeReport, picture: str) -> str:
    """The report as a Markdown page; ``picture`` is the file name of the curves."""
    published = bool(report.published_by)
    lines = [
        f"# Recipe {report.recipe}, seed {report.seed}",
        "",
        f"{report.held_out_tasks} held-out tasks, one sampled run of each; 95 % intervals over tasks. A run passes "
        "with a reward of at least 1, correct or not.",
        "",
        *_head(report),
        *(_row(curve, published) for curve in report.curves),
        "",
    ]
    if published:
        lines += [f"Published: {report.published_by}.", ""]
    lines += [f"![Figures by round]({picture})", ""]
    for title, transcripts in (("Before training", report.before), ("After training", report.after)):
        lines += [f"## {title}: the first failed and the first passed run that the evaluation kept", ""]
        for transcript in transcripts:
            lines += _transcript(transcript)
    return "\n".join(lines)


def draw(reports: Sequence[RecipeReport]) -> bytes:
    """Draw a PNG with a panel for each figure and a line for each report (for instance of several seeds)."""
    from matplotlib.figure import Figure as Drawing

    curves = reports[0].curves
    drawing = Drawing(figsize=(3.6 * len(curves), 3.2), dpi=120, facecolor="white", layout="constrained")
    for column, curve in enumerate(curves):
        axes = drawing.add_subplot(1, len(curves), column + 1)
        scale = 100 if curve.figure.is_share else 1
        for report in reports:
            values = report.curves[column].values
            x, y = [value.round for value in values], [scale * value.mean for value in values]
            (line,) = axes.plot(x, y, marker="o", markersize=4, label=f"seed {report.seed}")
            low, high = [scale * value.low for value in values], [scale * value.high for value in values]
            axes.fill_between(x, low, high, alpha=0.15, color=line.get_color())
        axes.set_title(curve.figure.label + (", %" if curve.figure.is_share else ""), fontsize=11)
        axes.set_xlabel(
            "round" if reports[0].ends == list(ENDS) else f"round; up to 0: {', '.join(reports[0].ends[:-1])}"
        )
        axes.grid(alpha=0.3)
        if len(reports) > 1 and column == 0:
            axes.legend(frameon=False, fontsize=9)
    return png_of(drawing)


def shown(value: float, is_share: bool) -> str:
    """``74.2 %`` for a share, ``4.67`` for a mean."""
    return f"{value:.1%}".replace("%", " %") if is_share else f"{value:.2f}"


def change(before: float, after: float, is_share: bool) -> str:
    """``+12.1 points`` for a share, ``-27 %`` for a mean, and the difference where a mean was 0."""
    if not is_share and before == 0:
        return f"{after:+.2f}"
    return f"{100 * (after - before):+.1f} points" if is_share else f"{100 * (after / before - 1):+.0f} %"


def _evaluations(project: "Project") -> list[EvaluationResult]:
    return [result for number in project.store.rounds() if (result := evaluation_of(project.store, number))]


def _values(results: Sequence[EvaluationResult], figure: Figure) -> list[Value]:
    return [value for result in results if (value := _value(result, figure.metric))]


def _value(result: EvaluationResult, metric: str) -> Value | None:
    by_name = {name.split("/", 2)[2]: value for name, value in result.metrics.items()}
    (count,) = {name.rsplit("@", 1)[1] for name in by_name if name.startswith("reward/mean@")}
    mean, error = by_name.get(f"{metric}/mean@{count}"), by_name.get(f"{metric}/stderr@{count}", 0.0)
    return None if mean is None else Value(result.round, mean, mean - _Z * error, mean + _Z * error)


def _chosen(result: EvaluationResult) -> list[Transcript]:
    failed = [kept for kept in result.transcripts if kept.reward < result.pass_threshold - REWARD_ROUNDING]
    passed = [kept for kept in result.transcripts if kept.reward >= result.pass_threshold - REWARD_ROUNDING]
    return [*failed[:1], *passed[:1]]


def _head(report: RecipeReport) -> list[str]:
    first, *others = report.ends
    cells = ["figure", *report.ends, "change"]
    if report.published_by:
        cells += [f"published {first}", *others, "change"]
    return [f"| {' | '.join(cells)} |", "|" + "---|" * len(cells)]


def _row(curve: FigureCurve, with_published: bool) -> str:
    share, published, ends = curve.figure.is_share, curve.figure.published, curve.ends
    intervals = [f"{shown(end.mean, share)} [{shown(end.low, share)}, {shown(end.high, share)}]" for end in ends]
    cells = [curve.figure.label, *intervals, change(ends[0].mean, ends[-1].mean, share)]
    if with_published and published is None:
        cells += [""] * (len(ends) + 1)
    elif published is not None:
        cells += [*(shown(value, share) for value in published), change(published[0], published[-1], share)]
    return f"| {' | '.join(cells)} |"


def _transcript(transcript: Transcript) -> list[str]:
    verdict = f"reward {transcript.reward:.2f}, expected {transcript.expected}"
    lines = [f"Task {transcript.task_id}: {verdict}.", "", "```"]
    for message in transcript.messages:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        lines += [f"{message['role']} calls {call['name']} {call['arguments']}" for call in calls]
        if message.get("content"):
            lines.append(f"{message['role']}: {message['content']}")
    return [*lines, "```", ""]
