"""The table of rounds: what the notes say, where the time went, who is champion, what comes next."""

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from dagster import DagsterEvent, DagsterEventType, DagsterRun, DagsterRunStatus
from rich.console import Console
from typer.testing import Result

from rft_platform.cli.views.demo_summary import print_summary, summary_of, write_summary
from rft_platform.common.files import write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.definitions import defs
from rft_platform.evaluation.metrics import PassRate
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.record import JudgedRow, row_id
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.dagster_internals.run_launcher import DRIVER_TAG
from rft_platform.jobs.instance import open_instance
from rft_platform.online.project import open_project
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.online.traffic.round_rows import RoundRule
from rft_platform.rounds.project.code_version import keep_user_code, user_code_of
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RowSelection,
    publish,
    read,
    write,
)
from rft_platform.rounds.reporting.round_history import time_split
from rft_platform.rounds.warm_start import WarmStartTraining
from rft_platform.run import start
from rft_platform.run.project_checks import is_finished
from rft_platform.run.round_lines import (
    EQUAL,
    RoundNews,
    champion_notes,
    describe_round,
    nothing_trained,
    round_lines,
)
from rft_platform.run.run_cost import recorded_cost
from rft_platform.training.protocol import StepEvent
from tests.experience.samples import rollouts
from tests.support.records import trained
from tests.support.traffic import fill


@pytest.fixture
def project(home: Home, write_config: Callable[..., Path]) -> Project:
    """Two rounds of two are done: the second was not promoted."""
    start.write_config(home, load_config(write_config()))
    project = Project.open(home)
    store = project.store
    with recorded_cost(home) as cost:
        for number, sampled in ((0, 0.25), (1, 0.75), (2, 0.5)):
            model_version = f"{number + 1}"
            publish(store, Policy(f"/checkpoints/{number}", number, "digest", number, model_version=model_version))
            scores = {"sampled_pass": sampled, "greedy_pass": sampled + 0.125, "evaluation_s": 2.0, "deploy_s": 0.25}
            write(store, number, RoundEvaluation(promoted=number < 2, metrics=scores))
        for number in (1, 2):
            write(store, number, Explored(rows=32, seconds=4.0, tokens_per_s=1000.0))
            write(store, number, Judged(mean_reward=0.5 * number, seconds=0.5, sound=True))
            metrics = {"mismatch_k3": 1e-6, "entropy": 0.75}
            write(store, number, trained(metrics=metrics, steps=1, seconds={"load": 0.25, "save": 1.5}))
            store.write_judged(number, "judge-1", [JudgedRow(f"{number}", "group", "run", 0, 1.0, {}, "judge-1", 0.0)])
        cost.launches = [{"kind": kind, "round": 1, "run_id": kind, "wall_s": 4.5} for kind in ("explore", "sync")]
    return project


def test_a_line_joins_the_notes_of_a_round(project: Project) -> None:
    start, first, second = round_lines(project)

    assert (start.round, start.pass_rate_sampled, start.rows, start.champion) == (0, 0.25, None, False)
    assert (first.reward, first.pass_rate_sampled, first.pass_rate_greedy) == (0.5, 0.75, 0.875)
    assert (first.mismatch, first.entropy, first.rows, first.tokens_per_s) == (1e-6, 0.75, 32, 1000.0)
    assert (first.policy_version, first.model_version, first.checkpoint) == (1, "2", "/checkpoints/1")
    assert first.champion
    assert not second.champion, "its evaluation promoted nothing"


def test_a_champion_that_is_not_the_newest_version_is_explained(project: Project, rft: Callable[..., Result]) -> None:
    assert champion_notes(project, round_lines(project)) == [], "no gate has decided"
    evaluated = read(project.store, 2).evaluated
    assert evaluated is not None
    short = {"gate": "all figures", "gate_summary": "+0.7 points, not clearly better than v1"}
    write(project.store, 2, replace(evaluated, gate_passed=False, **short))

    lines = round_lines(project)
    assert describe_round(lines[2]).endswith("not promoted: +0.7 points, not clearly better than v1")
    notes = [
        "v2 was not promoted: +0.7 points, not clearly better than v1",
        "a version becomes champion if the 95 % interval of the gain over the champion in sampled_pass lies above 0",
    ]
    assert champion_notes(project, lines) == notes
    assert rft("rounds").stdout.splitlines()[-3:-1] == notes
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary_of(project), console)
    printed = console.file.getvalue()
    assert "(policy version 1, sampled 75.0%, greedy 87.5%)" in printed and all(line in printed for line in notes)

    first = read(project.store, 1).evaluated
    assert first is not None
    write(project.store, 1, replace(first, promoted=False))
    assert champion_notes(project, round_lines(project))[-1] == (
        "a version becomes the first champion if the gain over the start in sampled_pass is at least 0"
    )


def test_overhead_is_what_the_launches_took_beyond_the_work(project: Project) -> None:
    _, first, second = round_lines(project)

    assert first.seconds == {"rollout": 4.0, "judge": 0.5, "train": 2.0, "evaluation": 2.0, "overhead": 0.5}
    assert "overhead" not in second.seconds, "nobody timed its launches"


def test_overhead_of_a_round_that_the_daemon_launched(project: Project) -> None:
    with open_instance(project.home) as instance:
        for job in ("explore_job", "sync_round_job", "evaluate_job"):
            tags = {"dagster/partition": "r0002"}
            instance.add_run(DagsterRun(job_name=job, status=DagsterRunStatus.STARTED, tags=tags))
        for record in instance.get_run_records():
            event = DagsterEvent(DagsterEventType.RUN_SUCCESS.value, record.dagster_run.job_name)
            end = record.create_timestamp + timedelta(seconds=5)
            instance.run_storage.handle_run_event(record.dagster_run.run_id, event, end)
    _, first, second = round_lines(project)
    assert first.seconds["overhead"] == 0.5
    assert second.seconds["overhead"] == pytest.approx(2 * 5 - 8.5)


def test_rounds_are_news_once(project: Project) -> None:
    news = RoundNews(project)
    assert news() == []

    write(project.store, 3, RoundEvaluation(promoted=True, metrics={"sampled_pass": 0.875, "greedy_pass": 1.0}))

    assert news() == ["r0003  held-out sampled 87.5%  greedy 100.0%  champion"]
    assert news() == []


def test_a_round_is_news_if_the_start_is_not_evaluated(tmp_path: Path) -> None:
    project: Any = SimpleNamespace(store=ExperienceStore(tmp_path), policies={"policy": None})
    publish(project.store, Policy("/base", 0, "digest", 0))
    news = RoundNews(project)
    assert news() == []
    publish(project.store, Policy("/checkpoints/12", 12, "digest", 1))
    write(project.store, 1, RoundEvaluation("no held-out tasks"))
    assert news() == ["r0001  policy v12"]


def test_the_command_prints_a_table_and_json(project: Project, rft: Callable[..., Result]) -> None:
    explained = rft("rounds", "--help").stdout
    assert "seconds of rollouts" in explained and "reward >= 1" in explained
    table, document = rft("rounds"), json.loads(rft("rounds", "--json").stdout)

    assert "75.0%" in table.stdout
    assert "champion" in table.stdout
    assert table.stdout.splitlines()[-1] == "finished: all 2 rounds are done"
    assert [line["round"] for line in document["rounds"]] == [0, 1, 2]
    assert document["next"] == "finished: all 2 rounds are done"


def test_failed_runs_are_shown(project: Project, rft: Callable[..., Result]) -> None:
    figures = {"runs": 12, "failed": 6, "dropped_groups": 3}
    write(project.store, 1, Explored(rows=6, seconds=4.0, tokens_per_s=1000.0, figures=figures))
    _, first, second = json.loads(rft("rounds", "--json").stdout)["rounds"]
    assert (first["runs"], first["failed_runs"], first["dropped_tasks"]) == (12, 6, 3)
    assert second["failed_runs"] is None
    shown = rft("rounds").stdout
    assert shown.count("r0001: 6 of 12 runs failed, 3 tasks dropped\n") == shown.count("runs failed") == 1
    assert describe_round(round_lines(project)[1]).endswith("champion  6 of 12 runs failed, 3 tasks dropped")


def test_versions_are_listed_with_their_held_out_pass_rates(project: Project, rft: Callable[..., Result]) -> None:
    result = EvaluationResult(
        1, 1, tasks=20, tasks_digest="t", sampled_n=1, temperature=1.0, seed=1, pass_threshold=1.0,
        measured_by="m", sampled=PassRate(0.75, 0.6, 0.85, 20, 20), greedy=PassRate(0.875, 0.7, 0.95, 20, 20),
        mean_reward=0.75, failed_runs=0, completion_tokens=40, truncated_share=0.0, seconds=1.0,
    )  # fmt: skip
    evaluated = read(project.store, 1).evaluated
    assert evaluated is not None
    write(project.store, 1, replace(evaluated, results=[result]))

    lines = rft("models", "list").stdout.splitlines()
    columns, first, second = (
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in (lines[1], *lines[4:6])
    )
    assert dict(zip(columns, first, strict=True)) == {
        "policy version": "1", "round": "1", "model version": "2", "alias": "", "sampled": "75.0%",
        "greedy": "87.5%", "mean reward": "0.75",
    }  # fmt: skip
    assert second[4:] == ["–", "–", "–"], "this round has no scores"
    refused = rft("models", "compare", 3, 1).stderr
    compared = rft("models", "compare", 1, 2)
    assert compared.exit_code == 2 and "`rft eval --all` evaluates every version" in " ".join(compared.stderr.split())
    assert "no policy version 3; the policy versions are: 0, 1, 2; model version 3 is policy version 2" in refused


def test_a_service_that_ignores_released_versions_is_reported(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    start.write_config(home, load_config(write_config(buffer=buffer, algorithm={"algorithm_type": "reinforce++"})))
    project = open_project(home)
    for number in range(3):
        publish(project.store, Policy(str(home.root), 8 * number, "0" * 64, number))
        write(project.store, number, RoundEvaluation("no tasks"))
    assert "until the next decision" not in rft("models", "list").stdout + rft("rounds").stdout
    assert json.loads(rft("rounds", "--json").stdout)["pinned"] is None
    release_commands(project).promote(0)
    for command in ("models", "list"), ("rounds",):
        shown = rft(*command).stdout
        assert "version 0 serves until the next decision, and 8, 16 wait" in shown
        assert "`rft models promote --newest`" in shown
    pinned = json.loads(rft("rounds", "--json").stdout)["pinned"]
    assert pinned and pinned == json.loads(rft("models", "list", "--json").stdout)["pinned"]


def test_many_stale_rows_are_reported(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    start.write_config(home, load_config(write_config(buffer=buffer, algorithm={"algorithm_type": "reinforce++"})))
    traffic = fill(traffic_database(open_project(home)))
    assert "stale" not in rft("rounds").stdout
    traffic.commit()
    traffic.settle(1, RoundRule(oldest_version=9))
    assert (
        "2 of 2 committed rows have become stale so far, before a training could take them: raise"
        in rft("rounds").stdout
    )


def test_a_home_that_only_serves_names_no_threshold(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    config = load_config(write_config(mode="serve", buffer=buffer, algorithm={"algorithm_type": "reinforce++"}))
    start.write_config(home, config)
    project = open_project(home)
    publish(project.store, Policy(str(home.root), 0, "0" * 64, 0))
    write(project.store, 0, RoundEvaluation("no tasks"))
    assert rft("rounds").stdout.splitlines()[-1] == "this home only serves; the training runs in mode train"


def test_the_command_names_the_first_step_of_a_new_project(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    start.write_config(home, load_config(write_config()))

    assert rft("rounds").stdout.splitlines()[-1] == "next: starting policy"


def test_the_summary_compares_the_start_with_the_last_evaluation(project: Project, tmp_path: Path) -> None:
    summary = summary_of(project)
    write_summary(summary, tmp_path / "results.json")
    document = json.loads((tmp_path / "results.json").read_text())

    assert is_finished(project)
    assert (summary.held_out_pass_before, summary.held_out_pass_after) == (0.25, 0.5)
    assert (summary.greedy_before, summary.greedy_after) == (0.375, 0.625)
    assert summary.model_version == "models:/sums-one/3"
    assert summary.champion == "models:/sums-one/2"
    assert document["held_out_n"] == 4
    assert [line["round"] for line in document["rounds"]] == [1, 2]
    assert document["machine"]["cpus"] >= 1
    assert document["wall_s"] > 0


NOTHING = f"nothing trained: all 32 rows have advantage 0 ({EQUAL})"


def test_a_round_without_training_is_reported(project: Project, rft: Callable[..., Result]) -> None:
    store = project.store
    write(store, 3, trained(metrics={"rows": 32.0, "rows_dropped": 0.0}, steps=0, seconds={}))
    publish(store, Policy("/checkpoints/0", 0, "digest", 3))
    news = RoundNews(project)
    write(store, 3, RoundEvaluation(promoted=False, metrics={}))

    assert news() == [f"r0003  policy v0  {NOTHING}"]
    assert f"r0003: {NOTHING}" in rft("rounds").stdout.splitlines()
    write(store, 4, trained(metrics={"rows": 32.0, "rows_dropped": 0.0}, steps=0, seconds={}))
    publish(store, Policy("/checkpoints/0", 0, "digest", 4))
    assert f"r0003 to r0004: {NOTHING}" in rft("rounds").stdout.splitlines()
    assert NOTHING not in describe_round(round_lines(project)[1])
    traced = rft("trace", "r0003")
    assert traced.exit_code == 2
    assert f"{NOTHING}; the round ended with its parent's weights" in " ".join(traced.output.split())


def test_a_run_is_traced_by_its_id(project: Project, rft: Callable[..., Result]) -> None:
    rows = rollouts(1, 1, round=7)
    run = rows[0].run_id
    rows += rollouts(1, 1, round=7, step=1, row_id=row_id(run, 1))
    project.store.write_rollouts(7, 0, rows)
    assert json.loads(rft("trace", run, "--json").stdout) == [
        json.loads(rft("trace", row_id(run, step), "--json").stdout) for step in (0, 1)
    ]
    assert [line for line in rft("trace", run).stdout.splitlines() if line.startswith("row ")] == [
        f"row {row_id(run, step)}" for step in (0, 1)
    ]
    missing = rft("trace", run.replace("r0007", "r0008"))
    assert missing.exit_code == 2 and "round 8 has no rows of this run" in " ".join(missing.output.split())


def test_the_table_distinguishes_a_later_judgement_from_the_trained_one(
    project: Project, rft: Callable[..., Result]
) -> None:
    store = project.store
    for number in (1, 2):
        write(store, number, replace(read(store, number).trained(), lineage={"judge_version": "old-1"}))
    write(store, 1, Judged(mean_reward=0.125, judge_version="new-2"))
    write(store, 2, Judged(mean_reward=0.5, judge_version="old-1"))
    assert [line.judged_anew for line in round_lines(project)] == [False, True, False]
    table = rft("rounds").stdout
    assert "0.125*" in table and "0.500*" not in table
    assert "r0001: judged again after its training" in table


def test_a_later_judgement_does_not_change_what_a_round_took(project: Project) -> None:
    store, wall = project.store, 9.0
    write(store, 1, replace(read(store, 1).trained(), lineage={"judge_version": "old-1"}))
    names = {"old-1": "exact_match"}
    write(store, 1, Judged(seconds=0.5, judge_version="old-1", judge_names=names))
    before = time_split(read(store, 1), wall)
    assert (before["judge"], before["overhead"]) == (0.5, 0.5)
    names |= {"new-2": "llm"}
    later = Judged(seconds=50.0, judge_version="new-2", judge_names=names, judge_seconds={"old-1": 0.5, "new-2": 50.0})
    write(store, 1, later)
    assert time_split(read(store, 1), wall) == before
    write(store, 1, Judged(seconds=50.0, judge_version="new-2", judge_names=names))  # the earlier time was not recorded
    assert not {"judge", "overhead"} & time_split(read(store, 1), wall).keys()


def test_rows_of_an_earlier_training_are_reported(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    dynamic = {"sync_style": "dynamic_by_explorer", "sync_interval": 1, "sync_offset": 1}
    start.write_config(home, load_config(write_config(synchronizer=dynamic)))
    store = Project.open(home).store
    for number in (1, 2, 3):
        write(store, number, Explored(rows=32))
    for number, sources in ((1, (1,)), (2, (2, 3))):
        write(store, number, trained(metrics={}, steps=1, seconds={}))
        write(store, number, RowSelection(sha256="sha", judge_versions=dict.fromkeys(sources, "judge-1")))
    assert [line.trained_in for line in round_lines(Project.open(home))] == [None, None, 2]
    assert "trained in r0002" in rft("rounds").stdout


def test_a_warm_start_reports_its_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("rft_platform.common.progress._last", {})
    course: Any = SimpleNamespace(
        settings=SimpleNamespace(steps=300), curve=[{"sampled_pass": 0.25, "loss": 9.0}], goal="sampled_pass reaches 1"
    )
    with caplog.at_level("INFO", logger="rft_platform.common.progress"):
        for step in (40, 300):
            WarmStartTraining._on_step(course, StepEvent(step, {"loss": 1.5}))
    assert [record.message for record in caplog.records] == [
        "warm start: 40/300 at most, until sampled_pass reaches 1  loss 1.5  sampled_pass 0.25"
    ]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"rows": 0.0, "rows_dropped": 8.0}, "filters dropped all 8 rows"),
        ({"rows": 4.0, "rows_dropped": 8.0}, f"all 4 rows have advantage 0 ({EQUAL}), filters dropped 8 rows"),
    ],
)
def test_filters_are_named_as_the_reason(metrics: dict[str, float], said: str) -> None:
    assert nothing_trained(trained(metrics=metrics)) == f"nothing trained: {said}"
    settled = {"rows": {"fresh": 0, "stale": 6}}
    stale = nothing_trained(trained(metrics={**metrics, "rows": 0.0}, lineage={"row_selection": settled}))
    assert stale == ("nothing trained: filters dropped 8 rows, 6 rows were older than synchronizer.max_staleness")
    assert nothing_trained(None) is nothing_trained(trained(steps=2, metrics=metrics)) is None


@pytest.mark.slow
def test_a_launch_whose_driver_died_is_called_interrupted(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    start.write_config(home, load_config(write_config()))
    dead = {DRIVER_TAG: f"{os.getpid()}@{psutil.Process().create_time() - 3600}"}
    with open_instance(home) as instance:
        job = defs.resolve_job_def("warm_start_job")
        run = instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags=dead)
        said = rft("rounds").stdout.splitlines()[-1]
        assert instance.get_run_by_id(run.run_id).status is DagsterRunStatus.STARTED, "looking repairs nothing"
    assert said == "interrupted: starting policy (its process has ended); `rft run` continues it; next: starting policy"


def test_the_trace_of_a_round_without_training_is_its_parents(
    project: Project, tmp_path: Path, rft: Callable[..., Result]
) -> None:
    folder = tmp_path / "global_step_1"
    manifest = {"policy_version": 1, "parent": "base", "parent_version": 0, "weights_digest": "w"}
    write_sealed_json(folder / "manifest.json", {**manifest, "lineage": {"round": 1, "algorithm": "grpo"}})
    publish(project.store, Policy(str(folder), 1, "digest", 3))
    write(project.store, 3, trained(metrics={"rows": 32.0}, steps=0, seconds={}))

    lines = rft("trace", "r0003").stdout.splitlines()
    assert lines[0] == f"r0003 {NOTHING}; the round ended with its parent's weights:"
    assert lines[1].startswith("policy version 1, round 1")


def test_a_changed_line_of_the_users_judge_appears_in_the_trace(
    home: Home, write_config: Callable[..., Path], tmp_path: Path, rft: Callable[..., Result]
) -> None:
    judge = tmp_path / "judge.py"
    taskset = {"path": str(tmp_path / "train.jsonl"), "judge": f"{judge}:reward"}
    judge.write_text("def reward(response, truth):\n    return float(truth in response)\n")
    start.write_config(home, load_config(write_config(buffer={"explorer_input": {"taskset": taskset}})))
    project, folders = Project.open(home), []
    for number in (1, 2, 3):
        if number == 3:
            judge.write_text("def reward(response, truth):\n    return float(truth == response)\n")
        code = keep_user_code(project)
        write(project.store, number, Explored(workflow_code=code))
        write(project.store, number, Judged(judge_codes={"judge-1": code, "judge-0": "0" * 16}))
        parent = folders[-1] if folders else tmp_path / "base"
        folders.append(project.checkpoints / f"global_step_{number}")
        manifest = {"policy_version": number, "parent": str(parent), "parent_version": number - 1}
        lineage = {
            "round": number,
            "project": "sums",
            "name": "one",
            **user_code_of([(read(project.store, number), "judge-1")]),
        }
        write_sealed_json(folders[-1] / "manifest.json", {**manifest, "weights_digest": "w", "lineage": lineage})
        publish(project.store, Policy(str(folders[-1]), number, "digest", number))

    assert "judge.py; the same as for policy version 1" in rft("trace", "r0002").stdout
    lines = rft("trace", "r0003").stdout.splitlines()
    assert any(line.endswith("judge.py; changed since policy version 2") for line in lines)
    assert "-    return float(truth in response)" in lines and "+    return float(truth == response)" in lines
    assert "+    return float(truth == response)" in rft("trace", "r0003", "--code").stdout.splitlines()
    assert "    return float(truth in response)" in rft("trace", "r0001", "--code").stdout.splitlines()
    traced = json.loads(rft("trace", "r0003", "--json").stdout)["trainings"]
    digests = [training["more"]["judge_code"] for training in traced]
    assert digests[1] == digests[2] != digests[0]


@pytest.mark.parametrize(
    ("target", "suggestion"),
    [
        ("3", "; did you mean r0003?"),
        ("r12", "; did you mean r0012?"),
        ("sums-one/3", "; did you mean models:/sums-one/3?"),
        ("sum-one@champion", "; did you mean models:/sums-one@champion?"),
        ("models/sums-one/3", None),
        ("sums-one", None),
        ("champion", None),
    ],
)
def test_a_target_that_resembles_a_round_or_the_model_gets_a_suggestion(
    project: Project, rft: Callable[..., Result], target: str, suggestion: str | None
) -> None:
    refused = rft("trace", target)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()[-1:]
    assert line.startswith(f"error: {target}: expected models:/NAME@alias")
    assert line.endswith(suggestion or "(32 hexadecimal digits)")


def test_the_newest_rounds_are_shown_and_the_others_counted(project: Project, rft: Callable[..., Result]) -> None:
    shown = rft("rounds", "--last", "1").stdout
    assert "r0002" in shown
    assert "r0001  " not in shown
    assert "2 earlier rounds are not shown" in shown
    assert "earlier rounds" not in rft("rounds").stdout
    assert len(json.loads(rft("rounds", "--json").stdout)["rounds"]) == 3
