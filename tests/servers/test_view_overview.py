"""The front page of `rft view`: curves, decisions of the gate, rewards, groups, and what the rounds took."""

import re
import time
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.evaluation.plots import CurvePoint
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.driver_lock import interface_port, servers_lock
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
    by_stage = overview.stages([start, first, second, third])
    assert [(each.name, each.share, each.left) for each in by_stage] == [
        ("rollout", 60.0, 0.0), ("judge", 20.0, 60.0), ("train", 10.0, 80.0), ("evaluation", 10.0, 90.0),
    ]  # fmt: skip
    assert overview.stages([start]) == []


def test_a_changed_record_is_read_again(home: Home) -> None:
    store = ExperienceStore(home.rounds)
    assert overview.summaries(store, [3])[0].decision == "kept"
    time.sleep(0.01)
    write(store, 3, RoundEvaluation(gate="0.4 against 0.5", promoted=True, promoted_because="asked by a customer"))
    again = overview.summaries(store, [3])[0]
    assert (again.decision, again.reason) == ("promoted", "promoted by hand: asked by a customer")


def test_the_learning_curve_marks_the_decisions_of_the_gate(home: Home) -> None:
    chart = overview.learning_curve(overview.summaries(ExperienceStore(home.rounds), range(4)))
    assert chart is not None
    assert dict(chart.lines)["series-a"] == "0.0,75.0 66.67,50.0 100.0,62.5"
    decided = [(mark.x, mark.y, mark.style, mark.title) for mark in chart.marks if mark.style in ("good", "bad")]
    assert decided == [
        (66.67, 50.0, "good", "round 2, version 8, promoted: 0.5 against 0.25 (50 %)"),
        (100.0, 62.5, "bad", f"round 3, version 12, kept: {UNSAFE} (37.5 %)"),
    ]
    assert overview.learning_curve([]) is None
    greedy = RoundSummary(1, CurvePoint(1, 4, greedy=0.5), "kept", "0.5 against 0.6")
    chart = overview.learning_curve([greedy])
    assert chart is not None and [mark.style for mark in chart.marks] == ["series-b", "bad"]


def test_the_histogram_counts_runs_and_links_to_them(home: Home) -> None:
    store = ExperienceStore(home.rounds)
    chart, unrewarded = overview.histogram(store, 3)
    rewards = [row.reward for row in store.judged_rows(3)]
    assert chart is not None and unrewarded == rewards.count(None)
    assert sum(bar.value for bar in chart.bars) + unrewarded == 8
    for bar in chart.bars:
        assert f"{bar.value:g} runs" in re.findall(r"([\d,]+ runs)", page(home, bar.link))[0]
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
    for expected in ("Held-out pass rate by round", "promoted: 0.5 against 0.25", "Runs of round 3 by reward", "37.5 %",
                     "Groups of one task side by side", '<span class="key series-d">evaluation</span>'):  # fmt: skip
        assert expected in text, expected
    assert UNSAFE not in text and "&lt;b&gt;kept" in text
    assert "style=" not in text and "<script>" not in text  # the content security policy forbids both
    monkeypatch.setattr(overview, "SHOWN_ROUNDS", 2)
    assert "All 4 rounds" in page(home) and "All 4 rounds" not in page(home, "/?rounds=all")


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
