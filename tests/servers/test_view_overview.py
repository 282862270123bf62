"""The front page of `rft view`: curves, decisions of the gate, rewards, groups, and what the rounds took."""

import html
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.evaluation.plots import CurvePoint
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.driver_lock import interface_port, servers_lock
from rft_platform.online.pages.charts import Chart, Series
from rft_platform.rounds.project.record import Explored, Judged, Policy, RoundEvaluation, Trained, write
from rft_platform.servers.ui_servers import interface_links
from rft_platform.servers.viewer import overview
from rft_platform.servers.viewer.app import view_app
from rft_platform.servers.viewer.overview import RoundSummary
from tests.experience.samples import judged, rollouts

UNSAFE = "<b>kept</b>"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A project with round 0 and three rounds of two tasks: not evaluated, promoted, kept."""
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump({"model": {"model_path": "m"}, "buffer": {"explorer_input": {
        "taskset": {"path": "t.jsonl", "name": "set"}}}}))  # fmt: skip
    store = ExperienceStore(home.rounds)
    write(store, 0, Policy("m", 0, "w0", round=0))
    write(store, 0, RoundEvaluation(gate="no champion yet", gate_passed=True, metrics={"sampled_pass": 0.25}))
    gates = {
        1: RoundEvaluation(gate="not due in this round", metrics={"evaluation_s": 1.0}),
        2: RoundEvaluation(gate="0.5 against 0.25", gate_passed=True, promoted=True, metrics={
            "sampled_pass": 0.5, "sampled_pass_low": 0.4, "sampled_pass_high": 0.6, "greedy_pass": 1.0,
            "evaluation_s": 1.0, "evaluation_cpu_s": 0.5}),
        3: RoundEvaluation(gate=UNSAFE, gate_passed=False, metrics={"sampled_pass": 0.375, "evaluation_s": 1.0}),
    }  # fmt: skip
    for number, evaluated in gates.items():
        rows = rollouts(2, 4, round=number, policy_version=4 * number)
        store.write_rollouts(number, 0, rows)
        store.write_judged(number, "v1", judged(rows, "v1"))
        figures = {"prompt_tokens": 30, "completion_tokens": 10, "cpu_s": 1.0, "engine_cpu_s": 2.0}
        write(store, number, Explored(rows=len(rows), seconds=6.0, figures=figures))
        write(store, number, Judged("v1", True, len(rows), 0.1 * number, seconds=2.0, figures={"judge_tokens": 70}))
        write(store, number, Trained("c", 4 * number, f"w{number}", 4, {"tokens": 5.0}, {"forward": 1.0}, 3.0))
        write(store, number, Policy("c", 4 * number, f"w{number}", round=number))
        write(store, number, evaluated)
    return home


def page(home: Home, path: str = "/") -> str:
    answer = TestClient(view_app(home)).get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_round_has_its_decision_cost_and_scores(home: Home) -> None:
    start, first, second, third = overview.summaries(ExperienceStore(home.rounds), range(4))
    assert [each.decision for each in (start, first, second, third)] == ["", "", "promoted", "kept"]
    assert second.point is not None and (second.point.sampled, second.point.greedy) == (0.5, 1.0)
    assert second.seconds == {"rollout": 6.0, "judge": 2.0, "train": 1.0, "evaluation": 1.0}
    assert second.tokens == {"rollout": 40, "judge": 70, "train": 20, "evaluation": 0}
    assert second.processor_s == {"rollout": 3.0, "train": 3.0, "evaluation": 0.5}
    by_stage, times = overview.stages([start, first, second, third])
    assert [(each.name, each.share) for each in by_stage] == [
        ("rollout", 60.0), ("judge", 20.0), ("train", 10.0), ("evaluation", 10.0),
    ]  # fmt: skip
    assert times.rows()[0] == ("r1", "", ["6 s", "2 s", "1 s", "1 s"])
    none, times = overview.stages([start])
    assert none == [] and not times.shown


def test_a_changed_record_is_read_again(home: Home) -> None:
    store = ExperienceStore(home.rounds)
    assert overview.summaries(store, [3])[0].decision == "kept"
    time.sleep(0.01)
    write(store, 3, RoundEvaluation(gate="0.4 against 0.5", promoted=True, promoted_because="asked by a customer"))
    again = overview.summaries(store, [3])[0]
    assert (again.decision, again.reason) == ("promoted", "promoted by hand: asked by a customer")


def test_the_learning_curve_marks_the_decisions_of_the_gate(home: Home) -> None:
    chart = overview.learning_curve(overview.summaries(ExperienceStore(home.rounds), range(4)))
    assert chart.labels == ["r0", "r1", "r2", "r3"] and chart.unit == "%"
    sampled, greedy, promoted, kept = chart.shown
    assert sampled.values == [0.25, None, 0.5, 0.375] and sampled.band == [None, None, (0.4, 0.6), None]
    assert greedy.values == [None, None, 1.0, None]
    assert (promoted.name, promoted.style, promoted.values) == ("promoted", "good", [None, None, 0.5, None])
    assert (kept.name, kept.style, kept.values) == ("kept the champion", "bad", [None, None, None, 0.375])
    assert chart.rows() == [
        ("r0", "", ["25 %", "", "", ""]),
        ("r2", "", ["50 % (40 % to 60 %)", "100 %", "version 8, 0.5 against 0.25", ""]),
        ("r3", "", ["37.5 %", "", "", f"version 12, {UNSAFE}"]),
    ]
    assert not overview.learning_curve([]).shown
    assert {RoundSummary(1, None, each).style for each in ("kept", "rolled back")} == {"bad", "series-d"}
    greedy_only = RoundSummary(1, CurvePoint(1, 4, greedy=0.5), "kept", "0.5 against 0.6")
    chart = overview.learning_curve([greedy_only])
    assert [(each.style, each.values) for each in chart.shown] == [("series-b", [0.5]), ("bad", [0.5])]


def test_runs_without_a_reward_are_linked_and_show_the_error_of_their_judge(home: Home) -> None:
    store = ExperienceStore(home.rounds)
    rows = store.judged_rows(3)
    rows[1] = replace(rows[1], reward=math.nan, dropped_by="judge_error", judge_error="KeyError: 'shop' (judge.py:5)")
    store.write_judged(3, "v1", rows)
    link = re.findall(r'href="([^"]+)">1 run has no reward', page(home))[0]
    first = re.findall(r'href="(/runs/[^"]+)"', page(home, html.unescape(link)))[0]
    assert rows[1].run_id in first
    assert "No reward: KeyError: &#39;shop&#39; (judge.py:5)" in page(home, html.unescape(first))


def test_the_histogram_counts_runs_and_links_to_them(home: Home) -> None:
    store = ExperienceStore(home.rounds)
    chart, unrewarded = overview.histogram(store, 3)
    rewards = [row.reward for row in store.judged_rows(3)]
    assert unrewarded == rewards.count(None)
    assert sum(int(count) for _, _, (count,) in chart.rows()) + unrewarded == 8
    for _, link, (count,) in chart.rows():
        assert f"{count} runs" in re.findall(r"([\d,]+ runs)", page(home, link))[0]
    many = [(float(i) / 100, 1) for i in range(101)]
    parts = overview._intervals(many)
    assert len(parts) == 20 and sum(runs for *_, runs in parts) == 101
    assert parts[0][1] == 0.0 and parts[-1][2] == 1.0


def test_the_groups_of_a_task_are_shown_side_by_side(home: Home) -> None:
    shown = overview.groups(ExperienceStore(home.rounds), 3)
    assert [each.task_id for each in shown] == ["task-0", "task-1"]
    assert len(overview.groups(ExperienceStore(home.rounds), 2)[0].groups) == 2
    for each in shown:
        assert [(runs[0]["round"], runs[0]["version"], len(runs)) for runs in each.groups] == [
            (1, 4, 4), (2, 8, 4), (3, 12, 4),
        ]  # fmt: skip
        assert each.prompt.startswith("Größe")
    assert [overview.reward_style(value) for value in (None, -1.0, 0.0, 0.2, 0.5, 0.9, 1.0)] == [
        "unrewarded", "reward-0", "reward-0", "reward-1", "reward-2", "reward-3", "reward-4",
    ]  # fmt: skip


def test_the_page_shows_all_of_it_and_escapes_texts(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(home)
    for expected in ("Held-out pass rate by round", "version 8, 0.5 against 0.25", "Runs of round 3 by reward",
                     "37.5 %", "Groups of one task side by side",
                     '<span class="key series-d">evaluation</span>'):  # fmt: skip
        assert expected in text, expected
    assert UNSAFE not in text and "&lt;b&gt;kept" in text
    assert "style=" not in text and "<script>" not in text  # the content security policy forbids both
    monkeypatch.setattr(overview, "SHOWN_ROUNDS", 2)
    assert "All 4 rounds" in page(home) and "All 4 rounds" not in page(home, "/?rounds=all")


def test_the_page_has_the_figures_of_its_charts_as_json(home: Home) -> None:
    found = [json.loads(html.unescape(text)) for text in re.findall(r"data-chart='([^']*)'", page(home))]
    charts = {each["label"]: {part["name"]: part for part in each["series"]} for each in found}
    curve, rewards = charts["Held-out pass rate by round"], charts["Runs of round 3 by reward"]
    assert curve["sampled"]["values"] == [0.25, None, 0.5, 0.375] and curve["sampled"]["band"][2] == [0.4, 0.6]
    assert curve["kept the champion"]["notes"][3] == f"version 12, {UNSAFE}"
    assert charts["Mean reward by round"]["mean reward"]["values"] == pytest.approx([0.1, 0.2, 0.3])
    assert sum(rewards["runs"]["values"]) == 8 - overview.histogram(ExperienceStore(home.rounds), 3)[1]
    assert charts["Seconds of each stage by round"]["judge"]["values"] == [2.0, 2.0, 2.0]


def test_a_chart_is_json_also_of_odd_values() -> None:
    series = Series("s", "good", [math.nan, math.inf, 1234.5])
    odd = Chart(
        "c",
        "x",
        ["1", "2", "3"],
        [series, replace(series, notes=["", "", "\u202e1"]), Series("none", "bad", [None] * 3)],
    )
    values, notes = odd.data()["series"]
    assert values["values"] == [None, None, 1234.5] and notes["notes"][2] == r"\u202e1"
    assert [texts for *_, (texts, _) in odd.rows()] == ["nan", "inf", "1,234"]


def test_a_project_without_rounds_has_a_front_page(tmp_path: Path, home: Home) -> None:
    empty = Home(tmp_path / "empty")
    write_text(empty.config_file, home.config_file.read_text())
    assert "No round was evaluated yet." in page(empty) and "No rounds yet." in page(empty)


def test_links_to_the_interfaces_that_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_port(home) is None and interface_links(home, "localhost") == []
    with servers_lock(home, "train", Dagster="port 3210"):
        assert interface_links(home, "localhost") == [
            ("Dagster", "http://localhost:3210"), ("MLflow", "http://localhost:3210/mlflow"),
        ]  # fmt: skip
        assert 'href="http://testserver:3210"' in page(home)
        monkeypatch.setenv("RFT_UI_URL", "https://dagster.example/")
        assert dict(interface_links(home, "localhost"))["Dagster"] == "https://dagster.example"
    assert interface_port(home) is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@mlflow.example")
    ((name, address),) = interface_links(home, "localhost")
    assert name == "MLflow" and "secret" not in address
