"""The history of production traffic: what the status page draws of the stored calls."""

from typing import Any

import pytest
from sqlalchemy import event

from rft_platform.online.pages.history import history_charts, shortest_window
from rft_platform.online.traffic import history
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.history import Interval, first_call, traffic_history
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore

START = 1_000_000.0


class Clock:
    """A clock that a test sets."""

    now = START

    def __call__(self) -> float:
        return self.now


def fill(store: TrafficStore, clock: Clock, at: float, version: int | None, rewards: list[float | None]) -> None:
    """Calls at ``at`` with latencies 0.1, 0.2, ... s; a reward follows after 5 s."""
    for number, reward in enumerate(rewards):
        name, call = f"{at:.0f}-{version}-{number}", {"messages": [], "duration_s": (number + 1) / 10}
        store.record([NewCall(name, 0, call, version, 5, at)])
        if reward is not None:
            clock.now = at + 5
            store.give_feedback(NewFeedback(f"f-{name}", [name], reward))


@pytest.fixture
def engine(database_url: str) -> Any:
    """Three intervals of 100 s: two versions, none, and the newer version alone."""
    engine, clock = open_database(database_url), Clock()
    store = TrafficStore(engine, clock=clock)
    fill(store, clock, START + 10, 8, [1.0, 0.0, None])
    fill(store, clock, START + 20, 16, [0.5])
    fill(store, clock, START + 210, 16, [None, None])
    return engine


def test_intervals_have_success_delays_and_versions(engine: Any) -> None:
    first, second, third = traffic_history(engine, START, START + 300, 3)
    assert (first.versions, first.calls, first.rewarded) == ({8: 3, 16: 1}, 4, 3)
    assert first.success == pytest.approx(2 / 3) and first.mean_reward == pytest.approx(0.5)
    assert first.label_delay_s == (5.0, 5.0) and first.latency_s == pytest.approx((0.1, 0.3))
    assert second.calls == 0 and second.success is None and second.latency_s is None
    assert (third.versions, third.success, third.label_delay_s) == ({16: 2}, None, None)
    assert [(each.start, each.end) for each in (first, third)] == [(START, START + 100), (START + 200, START + 300)]
    assert traffic_history(engine, START + 300, START + 400, 1)[0].calls == 0


def test_the_charts_leave_gaps_out_and_share_the_calls_among_versions(engine: Any) -> None:
    charts = dict(history_charts(traffic_history(engine, START, START + 300, 3)))
    versions = {each.name: each.values for each in charts["Versions"].shown}
    assert versions == {"version 8": [0.75, None, 0.0], "version 16": [0.25, None, 1.0]}
    assert charts["Versions"].unit == "%" and charts["Latency"].unit == "s"
    assert charts["Calls"].rows() == [("13:46", "", ["4"]), ("13:48", "", ["0"]), ("13:50", "", ["2"])]
    title, chart = history_charts(traffic_history(engine, START + 300, START + 400, 2))[0]
    assert title == "Success" and not chart.shown
    assert history_charts([]) == []


def test_the_serving_and_the_newest_version_are_always_drawn() -> None:
    history = [Interval(0.0, 60.0, {None: 90, 8: 80, 16: 70, 24: 5, 32: 5})]
    shown = dict(history_charts(history, 24))["Versions"].shown
    assert {each.name: each.values for each in shown} == {
        "version 24": [0.02], "version 32": [0.02], "base model": [0.36], "others": [0.6],
    }  # fmt: skip
    assert dict(history_charts(history, 40))["Versions"].shown[0].name == "version 32"


def test_the_shortest_window_covers_the_first_call(engine: Any) -> None:
    assert first_call(engine) == START + 10
    ages = {60.0: "hour", 7200.0: "day", 90_000.0: "week", 10**6: "week"}
    assert {age: shortest_window(START, START + age) for age in ages} == ages
    assert shortest_window(None, START) == "hour"


def test_only_the_newest_calls_are_counted_and_few_texts_are_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, clock = open_database(f"sqlite:///{tmp_path / 'traffic.db'}"), Clock()
    store = TrafficStore(engine, clock=clock)
    fill(store, clock, START + 10, 8, [1.0] * 6)
    fill(store, clock, START + 210, 16, [1.0] * 4)
    monkeypatch.setattr(history, "_MOST", 4)
    monkeypatch.setattr(history, "_LATENCIES", 2)
    statements = list[tuple[str, Any]]()
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2:4]))
    found = traffic_history(engine, START, START + 300, 1)
    assert found[0].start == START + 10 and found[0].calls == 10
    selects = [(text, values) for text, values in statements if text.startswith("SELECT")]
    with engine.connect() as connection:
        for text, values in selects:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()
            index = "INDEX calls_recent" if "model_call" in text else "COVERING INDEX calls_recent"
            assert any(index in step[3] for step in plan), (text, plan)
            assert "model_call" not in text or 2 in values
