"""Plots of a project's progress, drawn on ``Figure`` objects: no global state, no window, safe in any thread."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
SAMPLED, GREEDY, _CHAMPION = "#2563eb", "#ea580c", "#ca8a04"
_SMALL = (
    ("reward", "mean reward", "#059669"),
    ("mismatch", "engine-trainer mismatch", "#7c3aed"),
    ("entropy", "entropy", "#db2777"),
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Results of one round; None if not measured. Round 0 is the starting policy."""

    round: int
    policy_version: int
    sampled: float | None = None
    sampled_low: float | None = None
    sampled_high: float | None = None
    greedy: float | None = None
    reward: float | None = None  # mean training reward
    mismatch: float | None = None  # KL between engine and trainer, k3 estimate, nats per token
    entropy: float | None = None  # nats per token


def learning_curve(points: Sequence[CurvePoint], title: str, champion_round: int | None = None) -> bytes:
    """Draw a PNG (960 x 640): held-out pass rates by round with confidence band; below reward, mismatch and entropy."""
    from matplotlib.figure import Figure

    points = sorted(points, key=lambda point: point.round)
    figure = Figure(figsize=(9.6, 6.4), dpi=100, facecolor="white")
    figure.text(0.065, 0.94, title, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.065, 0.9, _subtitle(points), fontsize=10.5, color=FAINT)
    _draw_pass_rates(figure.add_axes((0.065, 0.4, 0.895, 0.46)), points, champion_round)
    for column, (name, label, color) in enumerate(_SMALL):
        axes = figure.add_axes((0.065 + column * 0.322, 0.065, 0.251, 0.185))
        _draw_small(axes, points, name, label, color)
    return png_of(figure)


def png_of(figure: "Figure") -> bytes:
    """The picture of a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_pass_rates(axes: "Axes", points: Sequence[CurvePoint], champion_round: int | None) -> None:
    style(axes)
    axes.set_ylim(-0.02, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    banded = [p for p in points if p.sampled_low is not None and p.sampled_high is not None]
    (x, low), (_, high) = _series(banded, "sampled_low"), _series(banded, "sampled_high")
    axes.fill_between(x, low, high, color=SAMPLED, alpha=0.15, linewidth=0)
    ends = []
    for name, color, line in (("greedy", GREEDY, "--"), ("sampled", SAMPLED, "-")):
        x, y = _series(points, name)
        if x:
            axes.plot(x, y, line, color=color, linewidth=2.2, marker="o", markersize=_marker_size(x))
            ends.append((y[-1], x[-1], name, color))
    _label_ends(axes, ends)
    _mark_champion(axes, points, champion_round)
    axes.set_xlim(-0.02 * _last(points) - 0.05, _last(points) * 1.18)
    every = max(1, -(-len(points) // 12))
    shown = points[::every]
    axes.set_xticks([p.round for p in shown], [f"{p.round}\nv{p.policy_version}" for p in shown])
    axes.text(
        1.0,
        -0.085,
        "round\npolicy version",
        transform=axes.transAxes,
        fontsize=9,
        color=FAINT,
        ha="right",
        va="center",
    )


def _draw_small(axes: "Axes", points: Sequence[CurvePoint], name: str, label: str, color: str) -> None:
    style(axes)
    axes.set_xlim(-0.05 * _last(points), _last(points) * 1.05)
    axes.set_xticks([0, _last(points)])
    x, y = _series(points, name)
    axes.text(0, 1.14, label, transform=axes.transAxes, fontsize=9.5, color=INK)
    if not x:
        axes.text(0.5, 0.4, "not measured yet", transform=axes.transAxes, ha="center", color=FAINT, fontsize=9)
        axes.set_yticks([])
        return
    axes.text(
        1, 1.14, f"{y[-1]:.3g}", transform=axes.transAxes, ha="right", fontsize=9.5, fontweight="bold", color=color
    )
    axes.plot(x, y, color=color, linewidth=1.8, marker="o", markersize=_marker_size(x) * 0.65)
    low, high = min(y), max(y)
    room = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    axes.set_ylim(low - room, high + room)
    ticks = [low, high] if high > low else [high]
    axes.set_yticks(ticks, [f"{tick:.2g}" for tick in ticks])


def _label_ends(axes: "Axes", ends: list[tuple[float, int, str, str]]) -> None:
    """Label each curve at its last point; move the labels apart where the curves meet."""
    ends = sorted(ends)
    heights = [value for value, *_ in ends]
    if len(heights) == 2 and heights[1] - heights[0] < 0.07:
        middle = min(max(sum(heights) / 2, 0.035), 0.965)
        heights = [middle - 0.035, middle + 0.035]
    for (value, x, name, color), height in zip(ends, heights, strict=True):
        text = f"   {name} {value:.0%}" if value in (0.0, 1.0) else f"   {name} {value:.1%}"
        axes.annotate(text, (x, height), color=color, fontsize=10.5, fontweight="bold", va="center")


def _mark_champion(axes: "Axes", points: Sequence[CurvePoint], champion_round: int | None) -> None:
    for x, y in zip(*_series(points, "sampled"), strict=True):
        if x == champion_round:
            axes.plot([x], [y], marker="*", markersize=17, color=_CHAMPION, markeredgecolor="white", zorder=5)
            axes.annotate(
                "champion",
                (x, y),
                xytext=(0, -21 if y > 0.2 else 13),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=_CHAMPION,
            )


def _subtitle(points: Sequence[CurvePoint]) -> str:
    _, y = _series(points, "sampled")
    if not y:
        return "held-out pass rate: not evaluated yet"
    change = f"{y[0]:.1%} → {y[-1]:.1%}" if len(y) > 1 else f"{y[0]:.1%}"
    last = points[-1]
    rounds = "1 round" if last.round == 1 else f"{last.round} rounds"
    return f"held-out pass rate, sampled: {change} in {rounds}, {last.policy_version} optimiser steps"


def _series(points: Sequence[CurvePoint], name: str) -> tuple[list[int], list[float]]:
    pairs = [(p.round, value) for p in points if (value := getattr(p, name)) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _last(points: Sequence[CurvePoint]) -> int:
    return max((p.round for p in points), default=0) or 1


def _marker_size(x: Sequence[int]) -> float:
    return 6.0 if len(x) <= 15 else 3.5 if len(x) <= 40 else 0.0


def style(axes: "Axes") -> None:
    """Give axes the look of all plots: horizontal grid lines, no frame."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)


#: Markdown of fewer characters is shown in Dagster's table of an asset's metadata, longer Markdown behind a link.
SHOWN_INLINE = 1000
_SMALL_POINTS = 30  # of each curve, so that the picture is short enough
_WIDE, _HIGH = 300, 60


def inline_curve(points: Sequence[CurvePoint], champion_round: int | None = None) -> str:
    """The held-out pass rates by round as a small picture in Markdown, short enough to be shown in a table of Dagster.

    The text is shorter than ``SHOWN_INLINE``. The picture is an SVG in a data URI; a dot marks the champion. Empty
    without measured rates.
    """
    points = sorted(points, key=lambda point: point.round)
    lines, legend = [], []
    for name, color, label in (("sampled", SAMPLED, "blue"), ("greedy", GREEDY, "orange")):
        x, y = _series(points, name)
        if x:
            places = ",".join(_place(x[i], y[i], _last(points)) for i in _evenly(len(x)))
            lines.append(f"<polyline points='{places}' fill='none' stroke='{color}' stroke-width='2'/>")
            legend.append(f"{name} {y[-1]:.1%} ({label})")
    if not lines:
        return ""
    for number, rate in zip(*_series(points, "sampled"), strict=True):
        if number == champion_round:
            cx, cy = _place(number, rate, _last(points)).split(",")
            lines.append(f"<circle cx='{cx}' cy='{cy}' r='4' fill='{_CHAMPION}'/>")
            legend.append(f"champion: round {champion_round}")
    frame = f"<path d='M0,4H{_WIDE}M0,{_HIGH + 4}H{_WIDE}' stroke='{FAINT}' stroke-dasharray='2'/>"
    size = f"width='{_WIDE + 8}' height='{_HIGH + 8}'"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{frame}{''.join(lines)}</svg>"
    address = svg.replace("#", "%23").replace("<", "%3C").replace(">", "%3E").replace(" ", "%20")
    return f"![0 % to 100 %](data:image/svg+xml,{address})\n\n{', '.join(legend)}"


def _place(round_number: float, rate: float, last: float) -> str:
    return f"{round(_WIDE * round_number / last)},{round(_HIGH * (1 - rate)) + 4}"


def _evenly(count: int) -> list[int]:
    """At most ``_SMALL_POINTS`` of ``count`` indices, with the first and the last one."""
    if count <= _SMALL_POINTS:
        return list(range(count))
    return [index * (count - 1) // (_SMALL_POINTS - 1) for index in range(_SMALL_POINTS)]
