"""Charts of the web pages: data that ``static/charts.js`` draws by Chart.js, and that the template lists as a table.

Colours are classes of the style sheets, so that a chart follows dark mode.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rft_platform.common.redaction import visible

#: ``%``: values are shares, drawn from 0 to 1.
Unit = Literal["", "%", "s"]


@dataclass(frozen=True, slots=True)
class Series:
    """A value for each label of a chart, or None. ``style`` is the class of its colour, or one class for each value."""

    name: str
    style: str | Sequence[str]
    values: Sequence[float | None]
    band: Sequence[tuple[float, float] | None] = ()  #: the interval of each value
    notes: Sequence[str] = ()  #: a text for each value; such a series is drawn as marks without a line

    def text(self, index: int, unit: Unit) -> str:
        """A value as the table shows it."""
        value = self.values[index]
        if value is None:
            return ""
        band, note = self.band[index] if self.band else None, self.notes[index] if self.notes else ""
        interval = "" if band is None else f" ({number(band[0], unit)} to {number(band[1], unit)})"
        return note or number(value, unit) + interval


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over common labels. ``label`` describes the chart to people who cannot see it."""

    label: str
    x: str  #: name of the horizontal axis
    labels: Sequence[str]
    series: Sequence[Series]
    unit: Unit = ""
    bars: bool = False  #: stacked bars, not lines
    from_zero: bool = True
    links: Sequence[str] = ()  #: the page that each label leads to

    @property
    def shown(self) -> list[Series]:
        """The series with a value."""
        return [each for each in self.series if any(value is not None for value in each.values)]

    def data(self) -> Mapping[str, Any]:
        """The chart as JSON values."""
        series = [
            replace(
                each, values=[_finite(value) for value in each.values], notes=[visible(note) for note in each.notes]
            )
            for each in self.shown
        ]
        return asdict(replace(self, series=series))

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """Label, link and texts of the series: the rows of the table, without labels that have no value."""
        links = self.links or [""] * len(self.labels)
        found = [
            (label, links[index], [each.text(index, self.unit) for each in self.shown])
            for index, label in enumerate(self.labels)
        ]
        return [row for row in found if any(row[2])]


def number(value: float, unit: Unit = "") -> str:
    """A value with three digits or more, and its unit."""
    shown = 100 * value if unit == "%" else value
    return f"{f'{shown:,.0f}' if abs(shown) >= 100 else f'{shown:.3g}'} {unit}".rstrip()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
