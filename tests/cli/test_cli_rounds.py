"""The table of rounds: what the notes say, where the time went, who is champion, what comes next."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.cli.commands.demo import is_finished
from rft_platform.cli.ledger import recorded_cost
from rft_platform.cli.round_lines import round_lines
from rft_platform.cli.round_news import RoundNews
from rft_platform.cli.starting import put_in_force
from rft_platform.cli.summary import summary_of, write_summary
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.experience.record import JudgedRow
from rft_platform.rounds.policy import Policy, publish
from rft_platform.rounds.project import Project


@pytest.fixture
def project(home: Home, write_config: Callable[..., Path]) -> Project:
    """Two rounds of two are done: the second was not promoted."""
    put_in_force(home, load_config(write_config()))
    project = Project.open(home)
    store = project.store
    with recorded_cost(home) as cost:
        for number, sampled in ((0, 0.25), (1, 0.75), (2, 0.5)):
            model_version = f"{number + 1}"
            publish(store, Policy(f"/checkpoints/{number}", number, "digest", number, model_version=model_version))
            scores = {"sampled_pass": sampled, "greedy_pass": sampled + 0.125, "evaluation_s": 2.0, "deploy_s": 0.25}
            store.write_note(number, "evaluation", {"results": [], "promoted": number < 2, "metrics": scores})
        for number in (1, 2):
            store.write_note(number, "explore", {"rows": 32, "seconds": 4.0, "tokens_per_s": 1000.0})
            store.write_note(number, "judge", {"mean_reward": 0.5 * number, "seconds": 0.5, "sound": True})
            metrics = {"mismatch_k3": 1e-6, "entropy": 0.75}
            store.write_note(number, "train", {"metrics": metrics, "steps": 1, "seconds": {"load": 0.25, "save": 1.5}})
            store.write_judged(number, "judge-1", [JudgedRow(f"{number}", "group", "run", 0, 1.0, {}, "judge-1", 0.0)])
        cost.launches = [{"kind": kind, "round": 1, "run_id": kind, "wall_s": 4.5} for kind in ("explore", "sync")]
    return project


def test_a_line_joins_the_notes_of_a_round(project: Project) -> None:
    start, first, second = round_lines(project)

    assert (start.round, start.pass_rate_sampled, start.rows, start.champion) == (0, 0.25, None, False)
    assert (first.reward, first.pass_rate_sampled, first.pass_rate_greedy) == (0.5, 0.75, 0.875)
    assert (first.kl, first.entropy, first.rows, first.tokens_per_s) == (1e-6, 0.75, 32, 1000.0)
    assert (first.policy_version, first.model_version, first.checkpoint) == (1, "2", "/checkpoints/1")
    assert first.champion
    assert not second.champion, "its evaluation promoted nothing"


def test_overhead_is_what_the_launches_took_beyond_the_work(project: Project) -> None:
    _, first, second = round_lines(project)

    assert first.seconds == {"rollout": 4.0, "judge": 0.5, "train": 2.0, "evaluation": 2.0, "overhead": 0.5}
    assert "overhead" not in second.seconds, "nobody timed its launches"


def test_rounds_are_news_once(project: Project) -> None:
    news = RoundNews(project)
    assert news() == []

    project.store.write_note(
        3, "evaluation", {"promoted": True, "metrics": {"sampled_pass": 0.875, "greedy_pass": 1.0}}
    )

    assert news() == ["r0003  held-out sampled 87.5%  greedy 100.0%  champion"]
    assert news() == []


def test_the_command_prints_a_table_and_json(project: Project, rft: Callable[..., Result]) -> None:
    table, document = rft("rounds"), json.loads(rft("rounds", "--json").stdout)

    assert "75.0%" in table.stdout
    assert "champion" in table.stdout
    assert table.stdout.splitlines()[-1] == "finished: all 2 rounds are done"
    assert [line["round"] for line in document["rounds"]] == [0, 1, 2]
    assert document["next"] == "finished: all 2 rounds are done"


def test_a_project_that_has_not_begun_says_what_comes_first(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    put_in_force(home, load_config(write_config()))

    assert rft("rounds").stdout.splitlines()[-1] == "next: warm start"


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
