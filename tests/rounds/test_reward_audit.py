"""The audit of rewards: the figures of a judged round, and made histories with one defect each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.assets.checks import EVALUATION_CHECKS, EXPERIENCE_CHECKS, evaluation_results, experience_results
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.evaluation.results import RunScore, result_of
from rft_platform.experience.quality import check_judged, check_rollouts
from rft_platform.experience.record import JudgedRow
from rft_platform.experience.schema import judged_to_table, rows_to_table
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import TasksetJudge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, RoundEvaluation, write
from rft_platform.rounds.reporting.reward_audit import (
    Finding,
    RoundFigures,
    audit,
    audit_evaluation,
    audit_held_out,
    audit_round,
    part_shares,
    run_signals,
)
from tests.experience.samples import step_row
from tests.support.builders import write_rows


def history(rounds: int = 10, **changes: Any) -> list[RoundFigures]:
    """Rounds without a defect; a change is a value, or a function of the round's number."""
    sound: dict[str, Any] = {
        "mean_reward": 0.5, "reward_range": 1.0, "part_shares": {"solved": 0.7, "short": 0.3}, "run_tokens": 100.0,
        "equal_groups": 0.3, "tool_call_rate": 0.8,
    }  # fmt: skip
    made = sound | changes
    return [
        RoundFigures(number, **{name: value(number) if callable(value) else value for name, value in made.items()})
        for number in range(1, rounds + 1)
    ]


def failed(found: list[Finding]) -> list[str]:
    return [each.name for each in found if not each.passed]


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        (
            {"part_shares": lambda n: {"solved": 0.5 + n / 20, "short": 0.5 - n / 20}},
            "audit_parts",
            "part solved explains 95% of the variance of the reward (rounds 8 to 10)",
        ),
        (
            {"run_tokens": lambda n: 100.0 * 1.2**n},
            "audit_length",
            "runs have 521.7 tokens, 145.6 at first (rounds 8 to 10)",
        ),
        ({"run_tokens": lambda n: 100.0 / n}, "audit_length", "runs have 11.2 tokens, 61.1 at first (rounds 8 to 10)"),
        (
            {"equal_groups": lambda n: n / 10},
            "audit_groups",
            "90% of the groups have equal rewards, 20% at first (rounds 8 to 10)",
        ),
        (
            {"tool_call_rate": lambda n: 0.8 / n},
            "audit_tool_calls",
            "9.0% of the runs call a tool, 48.9% at first (rounds 8 to 10)",
        ),
    ],
)
def test_each_defect_is_found_by_one_audit_with_figure_and_rounds(
    changes: dict[str, Any], name: str, text: str
) -> None:
    found = audit(history(**changes))
    assert failed(found) == [name]
    (finding,) = [each for each in found if not each.passed]
    assert finding.text == text and finding.figures["limit"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rounds": 5, "run_tokens": lambda n: 100.0 * 2**n, "equal_groups": 1.0, "tool_call_rate": lambda n: 1 / n},
        {"run_tokens": lambda n: 100.0 + 10 * n},
        {"part_shares": {}, "tool_call_rate": 0.0, "run_tokens": None, "equal_groups": None},
        {"tool_call_rate": lambda n: 0.04 if n < 4 else 0.0},
        {"equal_groups": lambda n: 1.0 if n == 5 else 0.3},
    ],
    ids=["sound", "too few rounds", "slow growth", "not measured", "hardly a tool call", "one bad round"],
)
def test_histories_without_a_defect_pass_the_audit(changes: dict[str, Any]) -> None:
    assert failed(audit(history(**changes))) == []
    assert all(finding.text for finding in audit(history(**changes)))


def test_rounds_without_a_figure_are_left_out_of_its_audit() -> None:
    grown = audit(history(run_tokens=lambda n: None if n in (2, 9) else 100.0 * 2**n))[1]
    assert grown.text.endswith("(rounds 7 to 10)") and not grown.passed
    parts = audit(history(12, part_shares=lambda n: {"solved": 1.0} if n < 11 else {}))[0]
    assert parts.text.endswith("(rounds 8 to 10)") and not parts.passed
    assert audit(history(20, part_shares=lambda n: {"solved": 1.0} if n < 4 else {}))[0].passed


def test_the_shares_of_the_parts_add_up_to_one() -> None:
    runs = [{"solved": 0.7 * (n % 2), "short": 0.3 * (n % 3 == 0)} for n in range(12)]
    shares = part_shares(runs)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["solved"] == pytest.approx(0.7**2 * 0.25 / (0.7**2 * 0.25 + 0.3**2 * 2 / 9))
    assert part_shares([{"solved": 1.0}, {"solved": 1.0}]) == part_shares([]) == part_shares([{}]) == {}


def judged(run: str, reward: float, **parts: float) -> JudgedRow:
    return JudgedRow(f"{run}", f"group{run}", run, 0, reward, parts, "v", 0.0)


def test_the_signals_of_a_round_are_those_of_its_runs() -> None:
    tool_call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    rows = [
        step_row("a", 0, response_ids=[1, 2], taskset="sums", task_id="t", group_id="g", response=tool_call),
        step_row("a", 1, response_ids=[1, 2, 3], taskset="sums", task_id="t", group_id="g"),
        step_row("b", 0, response_ids=[1], taskset="sums", task_id="t", group_id="g"),
        step_row(
            "c", 0, response_ids=[1], taskset="sums", task_id="t", group_id="g", policy="other", response=tool_call
        ),
    ]
    scores = [judged("a", 2.0, exact_match=1.0, contains=0.0), judged("b", 0.0, exact_match=0.0, contains=0.0)]
    every = [scores[0], *scores, judged("c", 0.0, exact_match=0.0, contains=1.0)]
    weighted = build_judge([WeightedJudge(judge="exact_match", weight=2.0), WeightedJudge(judge="contains")])
    found = run_signals(rows, every, {"sums": TasksetJudge(weighted)})
    assert found == {
        "run_tokens": 3.0,  # (5 + 1) / 2
        "tool_call_rate": 0.5,
        "part_shares": {"contains": 0.0, "exact_match": 1.0},
    }
    assert "part_shares" not in run_signals(rows, every, {"sums": TasksetJudge(build_judge("exact_match", {}))})
    assert "part_shares" not in run_signals(rows, every, {"sums": TasksetJudge(None)})
    assert run_signals([], [], {}) == {}


def evaluation(number: int, solved: int, tasks: int = 40) -> Any:
    scores = [RunScore("sums", f"t{n}", "sampled", float(n < solved)) for n in range(tasks)]
    return result_of(
        scores, 1.0, round=number, policy_version=number, tasks=tasks, tasks_digest="t", sampled_n=1, temperature=1.0,
        seed=0, failed_runs=0, completion_tokens=1, truncated_share=0.0, seconds=1.0, measured_by="m",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "solved", "passed"),
    [(0.2, 20, False), (0.2, 18, False), (0.2, 21, True), (0.04, 20, True), (-0.2, 10, True)],
)
def test_the_held_out_result_should_follow_the_training_reward(gain: float, solved: int, passed: bool) -> None:
    before, now = history(3), [replace(each, round=each.round + 7, mean_reward=0.5 + gain) for each in history(3)]
    found = audit_held_out(before, now, evaluation(3, 20), evaluation(10, solved), "sampled_pass")
    assert found.passed is passed
    assert found.figures["training_gain"] == pytest.approx(gain)
    assert found.figures["held_out_gain"] == pytest.approx((solved - 20) / 40)
    assert f"the training reward changed by {gain:+.3f}, sampled_pass" in found.text
    assert found.text.endswith("(round 3 to 10)")


def test_evaluations_on_other_tasks_are_not_compared() -> None:
    other = replace(evaluation(10, 10), tasks_digest="other")
    assert audit_held_out(history(3), history(3, mean_reward=0.9), evaluation(3, 20), other, "sampled_pass").passed


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Twelve judged rounds whose runs become longer; the held-out result falls while the training reward rises."""
    tasks = {"path": write_rows(tmp_path / "tasks.jsonl", [{"question": "1+1=", "answer": "2"}])}
    config = {
        "model": {"model_path": "unused"},
        "buffer": {"batch_size": 1, "total_steps": 12, "explorer_input": {"taskset": tasks, "eval_tasksets": [tasks]}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    opened = Project.open(home)
    for number in range(1, 13):
        figures = {"max_reward": 1.0, "min_reward": 0.0, "run_tokens": 50.0 * number, "equal_groups": 0.1}
        write(opened.store, number, Judged(sound=True, mean_reward=number / 20, figures=figures))
        if number % 3 == 0:
            write(opened.store, number, RoundEvaluation(results=[evaluation(number, 40 - number)]))
    return opened


def test_the_records_of_a_project_are_audited(project: Project) -> None:
    assert failed(audit_round(project.store, 5)) == []
    assert failed(audit_round(project.store, 12)) == ["audit_length"]
    write(project.store, 2, Judged(sound=True, mean_reward=0.1))
    assert failed(audit_round(project.store, 12)) == ["audit_length"]
    assert [each.text for each in audit_round(project.store, 12)][1].startswith("runs have 550.0 tokens, 133.3 at")
    write(project.store, 2, Judged(sound=True, mean_reward=0.1, figures={"run_tokens": 100.0}))
    finding = next(each for each in audit_round(project.store, 12) if not each.passed)
    assert finding.text == "runs have 550.0 tokens, 100.0 at first (rounds 10 to 12)"
    assert audit_evaluation(project, 6).passed and audit_evaluation(project, 11).passed
    found = audit_evaluation(project, 12)
    assert not found.passed and found.text.endswith("by -0.150 (round 6 to 12)")


def test_each_audit_is_a_non_blocking_asset_check(project: Project) -> None:
    sound = check_rollouts(rows_to_table([]), None), check_judged(judged_to_table([]), rows_to_table([]))
    results = experience_results(*sound, audit_round(project.store, 12))
    assert [each.check_name for each in results] == [spec.name for spec in EXPERIENCE_CHECKS]
    audits = [spec for spec in [*EXPERIENCE_CHECKS, *EVALUATION_CHECKS] if spec.name.startswith("audit_")]
    assert len(audits) == 5 and not any(spec.blocking for spec in audits)
    length = next(each for each in results if each.check_name == "audit_length")
    assert not length.passed and length.metadata["newest"].value == 550
    evaluated = evaluation_results(True, "better", None, audit_evaluation(project, 12))
    assert [each.check_name for each in evaluated] == [spec.name for spec in EVALUATION_CHECKS]
    assert [each.passed for each in evaluated] == [True, True, False]
