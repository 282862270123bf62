"""Charts of the web pages: places in percent of the plot, which the template ``charts.html.jinja`` draws as inline SVG.

A chart needs no script and fits any width. Its colours are classes of ``pages.css``, so that it follows dark mode.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_TICKS = 5
_MARKED = 150  # lines with more points have no dots

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line through ``points``, and a band of ``(x, low, high)`` around it. ``style`` is the class of its colour."""

    name: str
    style: str
    points: Sequence[Place]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A dot with a text, which is shown when the pointer is on the dot."""

    x: float
    y: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, its text below it, the text that is shown when the pointer is on it, and the page that it links to."""

    text: str
    value: float
    style: str
    title: str
    link: str = ""
    #: Set by ``bar_chart``, in percent.
    left: float = 0.0
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis, at a place in percent."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template draws. ``label`` describes the chart to people who cannot see it."""

    label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    legend: Sequence[tuple[str, str]] = ()  # style, name
    lines: Sequence[tuple[str, str]] = ()  # style, points
    bands: Sequence[tuple[str, str]] = ()
    marks: Sequence[Mark] = ()
    bars: Sequence[Bar] = ()


def line_chart(
    label: str,
    series: Sequence[Series],
    marks: Iterable[Mark] = (),
    *,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
    x_range: Place | None = None,
    y_range: Place | None = None,
    x_ticks: Sequence[float] = (),
    whole: bool = False,
) -> Chart | None:
    """Lines over a common x axis; None without a point. ``whole``: the x axis has labels at whole numbers only.

    Without a range an axis covers the points. ``marks`` are drawn over the dots of the lines.
    """
    shown = [each for each in series if each.points]
    xs = [x for each in shown for x, _ in each.points]
    ys = [y for each in shown for y in (*(y for _, y in each.points), *(y for _, *ends in each.band for y in ends))]
    if not xs:
        return None
    left, right = x_range or _span(min(xs), max(xs))
    low, high = y_range or _span(min(ys), max(ys))
    x_at, y_at = _scale(left, right), _scale(low, high)

    def place(x: float, y: float) -> str:
        return f"{x_at(x)},{_from_top(y_at(y))}"

    dots = [
        Mark(x, y, each.style, f"{x_text(x)}: {each.name} {y_text(y)}")
        for each in shown if len(each.points) <= _MARKED for x, y in each.points
    ]  # fmt: skip
    return Chart(
        label,
        [Tick(x_at(x), x_text(x)) for x in x_ticks or _ticks(left, right, 1.0 if whole else 0.0) if left <= x <= right],
        [Tick(_from_top(y_at(y)), y_text(y)) for y in _ticks(low, high)],
        [(each.style, each.name) for each in shown],
        [(each.style, " ".join(place(*point) for point in each.points)) for each in shown],
        [(each.style, " ".join(place(*point) for point in _outline(each.band))) for each in shown if each.band],
        [Mark(x_at(m.x), _from_top(y_at(m.y)), m.style, m.title) for m in (*dots, *marks)],
    )  # fmt: skip


def bar_chart(label: str, bars: Sequence[Bar]) -> Chart | None:
    """Bars side by side from 0; None without a bar. Some bars have no text below if there are many."""
    if not bars:
        return None
    top = max(bar.value for bar in bars) or 1.0
    step, height = 100 / len(bars), _scale(0.0, top)
    every = max(1, -(-len(bars) // (_TICKS + 1)))
    return Chart(
        label,
        [Tick(round((i + 0.5) * step, 2), bar.text) for i, bar in enumerate(bars) if i % every == 0],
        [Tick(_from_top(height(y)), f"{y:,g}") for y in _ticks(0.0, top)],
        bars=[
            Bar(bar.text, bar.value, bar.style, bar.title, bar.link,
                round((i + 0.1) * step, 2), round(0.8 * step, 2), height(bar.value))
            for i, bar in enumerate(bars)
        ],
    )  # fmt: skip


def percent(value: float) -> str:
    """A rate as a text."""
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def _outline(band: Sequence[tuple[float, float, float]]) -> list[Place]:
    return [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]


def _span(low: float, high: float) -> Place:
    """A range with room for a single value."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _scale(low: float, high: float) -> Callable[[float], float]:
    return lambda value: round(100 * (min(max(value, low), high) - low) / (high - low), 2)


def _from_top(place: float) -> float:
    return round(100 - place, 2)


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About ``_TICKS`` multiples of 1, 2 or 5 times a power of ten, at least ``least`` apart, within the range."""
    rough = max((high - low) / _TICKS, least)
    unit = 10 ** math.floor(math.log10(rough))
    step = max(next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999), least)
    first = math.ceil(round(low / step, 6))
    return [round(index * step, 10) for index in range(first, math.floor(round(high / step, 6)) + 1)]
