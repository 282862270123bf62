"""The history of production traffic as charts of the status page."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rft_platform.online.pages.charts import Chart, Series, Unit
from rft_platform.online.traffic.history import Interval

#: Windows that the page offers, the shortest first: name, seconds.
WINDOWS = {"hour": 3600.0, "day": 86_400.0, "week": 604_800.0}
INTERVALS = 30
_VERSIONS = 3  # versions with a line of their own; the others share one


def shortest_window(first_call: float | None, now: float) -> str:
    """The shortest window that has all calls since the first one; the longest if none has."""
    covering = (name for name, seconds in WINDOWS.items() if first_call is None or first_call >= now - seconds)
    return next(covering, list(WINDOWS)[-1])


def history_charts(history: Sequence[Interval], serving: int | None = None) -> list[tuple[str, Chart]]:
    """Titles and charts; times are UTC. ``serving`` is the version that serves; None: the base model."""
    if not history:
        return []
    form = "%H:%M" if history[-1].end - history[0].start <= WINDOWS["day"] else "%m-%d %H:%M"
    labels = [time.strftime(form, time.gmtime(each.start)) for each in history]

    def chart(label: str, unit: Unit, *series: Series) -> Chart:
        return Chart(label, "start of the interval (UTC)", labels, series, unit)

    def of(name: str, style: str, value: Callable[[Interval], float | None]) -> Series:
        return Series(name, style, [value(each) for each in history])

    def delays(value: Callable[[Interval], tuple[float, float] | None]) -> list[Series]:
        return [of("95 %", "series-c", lambda each: (value(each) or (None, None))[1]),
                of("median", "series-a", lambda each: (value(each) or (None, None))[0])]  # fmt: skip

    success = [of("success", "series-a", lambda each: each.success), of("calls with a reward", "series-c", _labelled)]
    calls = of("calls", "series-a", lambda each: float(each.calls))
    return [
        ("Success", chart("Share of successful and of rewarded calls", "%", *success)),
        ("Calls", chart("Number of calls", "", calls)),
        ("Latency", chart("Seconds of a model call", "s", *delays(lambda each: each.latency_s))),
        ("Label delay", chart("Seconds from an answer to its reward", "s", *delays(lambda each: each.label_delay_s))),
        ("Versions", chart("Share of the calls by policy version", "%", *_shares(history, serving))),
    ]


def _labelled(each: Interval) -> float | None:
    return each.rewarded / each.calls if each.calls else None


def _shares(history: Sequence[Interval], serving: int | None) -> list[Series]:
    """The share of the serving version, of the newest, of those with the most calls, and of all others together."""
    totals = Counter[int | None]()
    for each in history:
        totals.update(each.versions)
    newest = max((version for version in totals if version is not None), default=None)
    drawn = dict.fromkeys([serving, newest, *(version for version, _ in totals.most_common())])
    own = [version for version in drawn if version in totals][:_VERSIONS]

    def share(versions: set[int | None]) -> list[float | None]:
        return [
            sum(n for version, n in each.versions.items() if version in versions) / each.calls if each.calls else None
            for each in history
        ]

    found = [
        Series(_name(version), f"series-{letter}", share({version}))
        for version, letter in zip(own, "abd", strict=False)
    ]
    others = set(totals) - set(own)
    return [*found, Series("others", "series-c", share(others))] if others else found


def _name(version: int | None) -> str:
    return "base model" if version is None else f"version {version}"
