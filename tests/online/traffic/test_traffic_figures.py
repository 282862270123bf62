"""What the policy does and how soon it is rated: actions, figures of the newest calls, and alerts on them."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.observability.alert_channels import COMMAND
from rft_platform.online.project import project_in
from rft_platform.online.traffic.alerts import CallFigures, TrafficWatch, traffic_figures
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.incoming import NewCall, NewFeedback, action_of
from rft_platform.online.traffic.project_traffic import traffic_database, traffic_store
from rft_platform.online.traffic.store import RESUMED, TrafficStore
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write

TOOL = {"type": "function", "function": {"name": "refund", "parameters": {"type": "object", "required": ["order"]}}}
NOW = 1_000_000.0


class Clock:
    """A clock that a test sets."""

    now = NOW

    def __call__(self) -> float:
        return self.now


def model_call(content: str | None = None, *calls: tuple[str, Any], tools: Any = (TOOL,)) -> dict[str, Any]:
    response: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        response["tool_calls"] = [
            {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return {"messages": [], "tools": list(tools), "response": response}


VALID, INVALID = model_call(None, ("refund", '{"order": 7}')), model_call(None, ("refund", '{"ord'))


@pytest.mark.parametrize(
    ("call", "action"),
    [
        (VALID, "tool_valid"),
        (model_call("I call it.", ("refund", '{"order": 7}'), ("refund", '{"order": 8}')), "tool_valid"),
        (INVALID, "tool_invalid"),
        (model_call(None, ("refund", "{}")), "tool_invalid"),
        (model_call(None, ("refund", "[]")), "tool_invalid"),
        (model_call(None, ("destroy", "{}")), "tool_invalid"),
        (model_call(None, ("refund", '{"order": 7}'), ("refund", "7")), "tool_invalid"),
        (model_call('<tool_call>{"name": "refund"', tools=(TOOL,)), "tool_invalid"),
        (model_call("<tool_call> is how a call begins.", tools=()), "answer"),
        (model_call("Which order do you mean? "), "question"),
        (model_call("*Which one?*"), "question"),
        (model_call("Is that all? Then good-bye."), "answer"),
        (model_call(None), "answer"),
        (model_call(None, ("refund", '{"order": 7}'), tools=({"name": "refund", "parameters": None},)), "tool_valid"),
        (model_call(None, (["refund"], "{}")), "tool_invalid"),
        (model_call(None, ("refund", "{}"), tools=({"name": ["refund"]},)), "tool_invalid"),
        (model_call(None, ("f", "{}"), tools=({"name": "f", "parameters": {"required": [{}]}},)), "tool_invalid"),
        ({}, "answer"),
    ],
)
def test_actions_are_counted_separately(call, action) -> None:
    assert action_of(call) == action


def fill(store: TrafficStore, clock: Clock, *, version: int = 0, start: int = 0) -> None:
    """Ten calls: six valid tool calls with reward 1 after 10 s, two invalid ones with 0.5, two questions without."""
    contents = [VALID] * 6 + [INVALID] * 2 + [model_call("Which?")] * 2
    recorded = clock.now
    for number, content in enumerate(contents, start):
        store.record([NewCall(f"m{number}", 0, content, version, 5, recorded)])
    clock.now += 10
    for number in range(start, start + 8):
        store.give_feedback(NewFeedback(f"f{number}", [f"m{number}"], 1.0 if number < start + 6 else 0.5))
    clock.now = recorded


def test_figures_of_the_newest_calls(database_url) -> None:
    engine, clock = open_database(database_url), Clock()
    store = TrafficStore(engine, clock)
    assert traffic_figures(engine, 0.0, {}).label_rate is None
    fill(store, clock)
    found = traffic_figures(engine, NOW - 100, {})
    assert (found.calls, found.labelled, found.label_rate) == (10, 8, 0.8)
    assert found.actions == {
        "tool_valid": CallFigures(6, 6, 1.0),
        "tool_invalid": CallFigures(2, 2, 0.5),
        "question": CallFigures(2, 0, None),
    }
    assert found.by_version == {0: CallFigures(10, 8, 0.875)}
    assert (found.rate("answer"), found.reward("answer")) == (0.0, None)
    assert found.label_delay_s == (10.0, 10.0)
    assert found.served_delay_s is None
    store.commit()
    assert len(store.settle(1)) == 8
    store.consume(1)
    assert traffic_figures(engine, NOW - 100, {1: 5}).served_delay_s is None, "no answer by the new weights yet"
    store.record([NewCall("new", 0, VALID, 5, 5, NOW + 70), NewCall("newer", 0, VALID, 6, 5, NOW + 90)])
    assert traffic_figures(engine, NOW - 100, {1: 5}).served_delay_s == (60.0, 60.0)
    assert traffic_figures(engine, NOW + 80, {1: 5}).calls == 1


def test_figures_read_no_texts_and_only_the_newest_calls(tmp_path, monkeypatch) -> None:
    engine, statements = open_database(f"sqlite:///{tmp_path / 'traffic.db'}"), list[tuple[str, Any]]()
    store, clock = TrafficStore(engine), Clock()
    fill(store, clock)
    clock.now += 50
    fill(store, clock, start=10)
    store.commit()
    store.settle(1)
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2:4]))
    monkeypatch.setattr("rft_platform.online.traffic.alerts._MOST", 9)
    assert traffic_figures(engine, 0.0, {1: 0}).calls == 10
    selects = [(text, values) for text, values in statements if text.startswith("SELECT")]
    assert len(selects) == 6
    with engine.connect() as connection:
        for text, values in selects:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()
            assert any("COVERING INDEX calls_recent" in step[3] for step in plan), (text, plan)


def test_a_reader_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'traffic.db'}")
    with engine.begin() as writer:
        writer.exec_driver_sql("DELETE FROM feedback")
        assert traffic_figures(engine, 0.0, {}).calls == 0


def test_a_round_that_trained_nothing_has_no_version_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
        }
    )
    project = project_in(Home(tmp_path / "home"), config)
    for number, version in enumerate((0, 4, 4, 8)):
        publish(project.store, Policy("model", version, "0" * 64, round=number))
    engine = open_database(f"sqlite:///{tmp_path / 'traffic.db'}")
    assert TrafficWatch(project, engine, TrafficStore(engine))._versions() == {1: 4, 3: 8}


def watched_project(folder: Path, model: Path, alerts: dict[str, float]) -> Project:
    """A project that pauses its training on alerts."""
    config = build_config(
        {
            "model": {"model_path": str(model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "reinforce++"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
            "service": {"pause_training_on_alert": True, "alerts": {"least_calls": 10, "window_s": 100, **alerts}},
        }
    )
    project = project_in(Home(folder / "home"), config)
    publish(project.store, Policy("model", 0, "0" * 64, round=0))
    write(project.store, 0, RoundEvaluation(promoted=False))
    return project


def test_an_open_alert_pauses_the_training_until_it_ends_or_a_user_resumes(tmp_path: Path, tiny_model: Path) -> None:
    project = watched_project(tmp_path, tiny_model, {"invalid_rate": 0.1})
    clock, store = Clock(), traffic_store(project)
    database = traffic_database(project)

    def updated() -> str | None:
        TrafficWatch(project, database, store, clock).update()  # a new process each time: the database has the alerts
        return observe(project, Launches()).paused

    assert updated() is None
    fill(store, clock)
    text = "invalid tool calls: 20.0%, the limit is 10.0% (service.alerts.invalid_rate)"
    assert (updated(), updated()) == (text, text)
    assert (
        f"r0001 collects no rows while an alert is open: {text}" in plan_next(observe(project, Launches())).waiting[0]
    )
    assert (store.resume_training("it is a test"), updated()) == (["invalid_rate"], None)
    assert store.resume_training("again") == []
    clock.now += 1000
    assert updated() is None
    clock.now -= 1000
    assert updated() == text, "a new alert pauses again"
    clock.now += 1000
    assert updated() is None
    kinds = [event.kind for event in reversed(store.events())]
    assert kinds == ["alert", *[RESUMED] * 2, "alert_ended", "alert", "alert_ended"]


def test_an_exceeded_limit_is_an_alert_until_it_is_kept_again(
    tmp_path: Path, tiny_model: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = tmp_path / "sent.jsonl"
    monkeypatch.setenv(COMMAND, f"sh -c 'cat >> {sent}; echo >> {sent}'")
    alerts = {"invalid_rate": 0.1, "invalid_reward": 0.4, "question_rate": 0.5, "label_rate": 0.9, "label_delay_s": 5,
              "served_delay_s": 1}  # fmt: skip
    project = watched_project(tmp_path, tiny_model, alerts)
    clock = Clock()
    engine = open_database(f"sqlite:///{tmp_path / 'traffic.db'}")
    store = TrafficStore(engine, clock)
    watch = TrafficWatch(project, engine, store, clock)
    watch.update()
    assert (watch().alerts, watch.metrics()["alerts"]) == ({}, 0)
    fill(store, clock)
    for _ in range(2):
        watch.update()
    assert dict(watch().alerts) == {
        "invalid_rate": "invalid tool calls: 20.0%, the limit is 10.0%",
        "invalid_reward": "mean reward of invalid tool calls: 0.5, the limit is 0.4",
        "label_rate": "calls with a reward: 80.0%, the limit is 90.0%",
        "label_delay_s": "seconds to a reward (p95): 10, the limit is 5",
    }
    assert [event.kind for event in store.events()] == ["alert"] * 4, "each is reported once"
    assert "invalid tool calls: 20.0%, the limit is 10.0% (service.alerts.invalid_rate)" in caplog.text
    received = [json.loads(line) for line in sent.read_text().splitlines()]
    assert [each["limit"] for each in received] == ["invalid_rate", "invalid_reward", "label_delay_s", "label_rate"]
    assert "invalid tool calls: 20.0%, the limit is 10.0% (service.alerts.invalid_rate)" in received[0]["text"]
    metrics = watch.metrics()
    assert (metrics["recent_calls_tool_invalid"], metrics["recent_reward_tool_invalid"]) == (2, 0.5)
    assert (metrics["recent_label_rate"], metrics["recent_label_delay_p95_s"], metrics["alerts"]) == (0.8, 10.0, 4)
    json.dumps(metrics)
    clock.now += 1000
    watch.update()
    assert watch().alerts == {}
    assert [event.kind for event in store.events(4)] == ["alert_ended"] * 4
