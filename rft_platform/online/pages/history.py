"""The history of production traffic as charts of the status page."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rft_platform.online.pages.charts import Chart, Place, Series, line_chart, percent
from rft_platform.online.traffic.history import Interval

#: Windows that the page offers: name, seconds.
WINDOWS = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
INTERVALS = 30
_VERSIONS = 3  # versions with a line of their own; the others share one


_TICKS = 8
_STEPS_S = (60.0, 600.0, 3600.0, 14_400.0, 86_400.0)


def history_charts(history: Sequence[Interval]) -> list[tuple[str, Chart | None]]:
    """Titles and charts; times are UTC."""
    if not history:
        return []
    span = (history[0].start, history[-1].end)
    step = next((step for step in _STEPS_S if (span[1] - span[0]) / step <= _TICKS), _STEPS_S[-1])
    ticks = [step * n for n in range(math.ceil(span[0] / step), math.floor(span[1] / step) + 1)]
    x_text = _clock("%m-%d" if step == _STEPS_S[-1] else "%H:%M")

    def chart(title: str, series: Sequence[Series], y_text: Callable[[float], str], top: float | None) -> Chart | None:
        highest = max((y for each in series for _, y in each.points), default=0.0)
        y_range = (0.0, highest or 1.0) if top is None else (0.0, top)
        return line_chart(title, series, x_text=x_text, y_text=y_text, x_range=span, x_ticks=ticks, y_range=y_range)

    def of(name: str, style: str, value: Callable[[Interval], float | None]) -> Series:
        return Series(name, style, _points(history, value))

    def delays(value: Callable[[Interval], tuple[float, float] | None]) -> list[Series]:
        return [of("95 %", "series-c", lambda each: (value(each) or (None, None))[1]),
                of("median", "series-a", lambda each: (value(each) or (None, None))[0])]  # fmt: skip

    success = [of("success", "series-a", lambda each: each.success), of("calls with a reward", "series-c", _labelled)]
    calls = [of("calls", "series-a", lambda each: float(each.calls))]
    return [
        ("Success", chart("Share of successful and of rewarded calls", success, percent, 1.0)),
        ("Calls", chart("Number of calls", calls, "{:,.0f}".format, None)),
        ("Latency in seconds", chart("Seconds of a model call", delays(lambda e: e.latency_s), _seconds, None)),
        ("Label delay in seconds",
         chart("Seconds from an answer to its reward", delays(lambda e: e.label_delay_s), _seconds, None)),
        ("Versions", chart("Share of the calls by policy version", _shares(history), percent, 1.0)),
    ]  # fmt: skip


def _labelled(each: Interval) -> float | None:
    return each.rewarded / each.calls if each.calls else None


def _points(history: Sequence[Interval], value: Callable[[Interval], float | None]) -> list[Place]:
    """The value of each interval at its middle."""
    return [((each.start + each.end) / 2, found) for each in history if (found := value(each)) is not None]


def _shares(history: Sequence[Interval]) -> list[Series]:
    """The share of the versions with the most calls, and of all others together."""
    totals = Counter[int | None]()
    for each in history:
        totals.update(each.versions)
    most = [version for version, _ in totals.most_common(_VERSIONS)]

    def share(versions: set[int | None]) -> list[Place]:
        return _points(history, lambda each: (
            sum(n for version, n in each.versions.items() if version in versions) / each.calls if each.calls else None
        ))  # fmt: skip

    found = [
        Series(_name(version), f"series-{letter}", share({version}))
        for version, letter in zip(most, "abd", strict=False)
    ]
    others = set(totals) - set(most)
    return [*found, Series("others", "series-c", share(others))] if others else found


def _name(version: int | None) -> str:
    return "base model" if version is None else f"version {version}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _clock(form: str) -> Callable[[float], str]:
    return lambda at: time.strftime(form, time.gmtime(at))
