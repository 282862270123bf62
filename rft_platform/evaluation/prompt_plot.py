"""The picture that compares a search for a prompt with the training: two curves on one axis of pass rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rft_platform.evaluation.plots import FAINT, GREEDY, INK, SAMPLED, CurvePoint, png_of, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class PromptCurvePoint:
    """Held-out pass rates of a prompt that was better than all before it; None if not measured."""

    runs: int  # of the search, until the prompt was measured
    sampled: float | None
    sampled_low: float | None
    sampled_high: float | None
    greedy: float | None


def prompt_and_training(
    prompts: Sequence[PromptCurvePoint], runs: int, rounds: Sequence[CurvePoint], title: str
) -> bytes:
    """Draw a PNG (960 x 460): left the prompts by the runs of the search, right the rounds.

    A prompt stays the best one until a better one is measured, so its curve has steps, to the end of the search.
    """
    from matplotlib.figure import Figure

    rounds = sorted(rounds, key=lambda point: point.round)
    figure = Figure(figsize=(9.6, 4.6), dpi=100, facecolor="white")
    figure.text(0.065, 0.92, title, fontsize=15, fontweight="bold", color=INK)
    figure.text(
        0.065,
        0.865,
        "held-out pass rates; both start with the same weights and the same prompt",
        fontsize=10.5,
        color=FAINT,
    )
    left, right = figure.add_axes((0.065, 0.15, 0.42, 0.58)), figure.add_axes((0.545, 0.15, 0.42, 0.58))
    _panel(left, "the prompt alone", "runs of the search", runs)
    _panel(right, "the training", "round", max((point.round for point in rounds), default=0) or 1)
    right.set_yticklabels([])
    for axes, points, until in (
        (left, [(p.runs, p) for p in prompts], runs),
        (right, [(p.round, p) for p in rounds], None),
    ):
        ends = [
            _draw(axes, [(x, getattr(point, name)) for x, point in points], name, color, line, until)
            for name, color, line in (("greedy", GREEDY, "--"), ("sampled", SAMPLED, "-"))
        ]
        _label_ends(axes, [end for end in ends if end is not None])
    _band(left, [(p.runs, p.sampled_low, p.sampled_high) for p in prompts], until=runs)
    _band(right, [(p.round, p.sampled_low, p.sampled_high) for p in rounds])
    if not any(point.round for point in rounds):
        right.text(
            0.5, 0.12, "no round evaluated yet", transform=right.transAxes, ha="center", color=FAINT, fontsize=10
        )
    return png_of(figure)


def _panel(axes: "Axes", name: str, label: str, last: int) -> None:
    style(axes)
    axes.set_ylim(-0.02, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlim(-0.03 * last, last * 1.45)
    axes.set_xticks(sorted({0, last // 2, last}), [f"{tick:,}" for tick in sorted({0, last // 2, last})])
    axes.text(0, 1.06, name, transform=axes.transAxes, fontsize=11.5, fontweight="bold", color=INK)
    axes.text(1, -0.13, label, transform=axes.transAxes, fontsize=9, color=FAINT, ha="right", va="center")


def _draw(
    axes: "Axes", points: Sequence[tuple[int, float | None]], name: str, color: str, line: str, until: int | None
) -> tuple[float, int, str, str] | None:
    """Draw a curve; with ``until`` it has steps, and ends there. Returns the end, for its label."""
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return None
    x, y = [x for x, _ in known], [y for _, y in known]
    marked = list(range(len(x)))
    if until is not None:
        x, y = [*x, max(until, x[-1])], [*y, y[-1]]
    axes.plot(
        x, y, line, color=color, linewidth=2.2, marker="o", markersize=5, markevery=marked,
        drawstyle="default" if until is None else "steps-post",
    )  # fmt: skip
    return y[-1], x[-1], name, color


def _label_ends(axes: "Axes", ends: Sequence[tuple[float, int, str, str]]) -> None:
    """Label each curve at its end, the higher one above the other."""
    for place, (value, x, name, color) in zip((-7, 7), sorted(ends), strict=False):
        axes.annotate(
            f"{name} {100 * value:.1f} %", (x, value), xytext=(7, place if len(ends) > 1 else 0),
            textcoords="offset points", color=color, fontsize=9.5, fontweight="bold", va="center",
        )  # fmt: skip


def _band(axes: "Axes", points: Sequence[tuple[int, float | None, float | None]], until: int | None = None) -> None:
    known = [(x, low, high) for x, low, high in points if low is not None and high is not None]
    if known and until is not None:
        known = [*known, (max(until, known[-1][0]), *known[-1][1:])]
    axes.fill_between(
        [x for x, _, _ in known], [low for _, low, _ in known], [high for _, _, high in known],
        color=SAMPLED, alpha=0.15, linewidth=0, step=None if until is None else "post",
    )  # fmt: skip
