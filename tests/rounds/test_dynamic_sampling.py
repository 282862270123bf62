"""Exploration that samples further tasks in place of groups without signal, and selectors that follow the outcomes."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import JudgeUnavailableError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.queries import task_outcomes
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.inference.interface import PolicyEngine
from rft_platform.judging.execution.judge_rollouts import judge_tasksets
from rft_platform.rounds.explore import explore
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Policy, RowSelection, all_figures, read
from rft_platform.rounds.selection.task_selection import SignalCount, TaskSelection
from rft_platform.rounds.train import lineage
from rft_platform.training.data.rollout_rows import read_rollouts
from tests.experience.samples import step_row

# Half of what a model says of a task of kind ``mixed`` is right, as its first letter tells; the others are settled.
JUDGE = """
import hashlib

def judge(task, response):
    if task["kind"] == "mixed":
        return float(hashlib.sha256((response or "").encode()).digest()[0] % 2)
    return float(task["kind"] == "easy")
"""
KINDS = ["easy", "hard", "mixed", "easy", "mixed", "hard", "mixed", "mixed", "mixed", "hard", "mixed", "easy"]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Any:
    """Opens a project on twelve tasks with two a batch, eight runs each."""
    judge_file, tasks = tmp_path / "kinds.py", tmp_path / "tasks.jsonl"
    judge_file.write_text(JUDGE)
    lines = [json.dumps({"question": f"{i}+{i}?", "answer": str(2 * i), "kind": kind}) for i, kind in enumerate(KINDS)]
    tasks.write_text("\n".join(lines))

    def make(home: str = "home", operators: Any = (), interval: int = 1, **selector: Any) -> Project:
        taskset = {
            "path": str(tasks),
            "judge": f"{judge_file}:judge",
            "task_selector": {"selector_type": "sequential", **selector},
        }
        config = build_config(
            {
                "model": {"model_path": str(tiny_model), "max_model_len": 64, "max_response_tokens": 4},
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
                "buffer": {"batch_size": 2, "total_steps": 4, "explorer_input": {"taskset": taskset}},
                "synchronizer": {"sync_interval": interval},
                "data_processor": {"experience_pipeline": {"operators": list(operators)}},
            }
        )
        return Project(Home(tmp_path / home), config)

    return make


def refilled(limit: int) -> list[dict[str, Any]]:
    return [{"name": "dynamic_sampling", "args": {"max_batches": limit}}]


def serving(engine: PolicyEngine, of_round: int = 0) -> Policy:
    status = engine.status()
    return Policy(str(status.weights_path), status.policy_version, status.weights_digest, of_round)


def kinds(project: Project, note: Explored) -> list[list[str]]:
    by_id = project.tasks.by_id()
    return [[by_id[task].raw["kind"] for task in batch] for batch in note.task_selection.tasks]


def test_sampling_ends_as_soon_as_the_groups_with_signal_are_as_many_as_wanted(start: Any) -> None:
    """Batches are easy, hard; mixed, easy; mixed, hard: one group each of the second and the third has a signal."""
    project = start(operators=refilled(4))
    tasks = project.tasks.tasks

    def sample(batch: int) -> list[RolloutRow]:
        return [
            step_row(
                f"{task.task_id}-{run}", 0, response_ids=[2], task_id=task.task_id, taskset=task.taskset,
                group_id=task.task_id, response={"role": "assistant", "content": str(run)},
            )
            for task in tasks[2 * batch : 2 * batch + 2]
            for run in range(8)
        ]  # fmt: skip

    count = SignalCount(project)
    count.begin()
    assert [count.enough(sample(batch)) for batch in range(3)] == [False, False, True]
    assert count.as_dict()["groups_with_signal"] == 2 and count.as_dict()["groups_surplus"] == 0


def test_a_round_samples_until_enough_groups_carry_a_signal(start: Any, policy_engine: PolicyEngine) -> None:
    project = start(operators=refilled(3))
    policy = serving(policy_engine)
    first = explore(project, policy_engine, policy, 1)
    assert kinds(project, first) == [["easy", "hard"], ["mixed", "easy"], ["mixed", "hard"]]
    counts = ("groups_wanted", "groups_sampled", "groups_with_signal", "groups_surplus")
    assert [first.figures[name] for name in counts] == [2, 6, 2, 0]
    assert (first.figures["runs"], first.rows) == (48, 48)
    judged = judge(project, 1)
    assert judged.sound and judged.figures["runs"] == 48 and judged.figures["dropped_rows"] == 32
    sampling, surplus = judged.operators
    origin = lineage(project, {1: read(project.store, 1)}, 1, RowSelection(), "run")
    assert origin["operators_version"] == judged.operators_version is not None
    assert (sampling.groups_in, sampling.groups_out, surplus.groups_out) == (6, 2, 2)

    second = explore(project, policy_engine, policy, 2)  # goes on where the first round ended
    assert kinds(project, second) == [["mixed", "mixed"]]
    assert second.task_selection.first_batch == 3
    third = explore(project, policy_engine, policy, 3)
    assert kinds(project, third) == [["mixed", "hard"], ["mixed", "easy"]], "the epoch is over, every task was visited"
    assert third.figures["groups_with_signal"] == 2
    trained = read_rollouts([str(f) for f in project.store.rollout_files(1)], [str(project.store.judged_file(1))],
                            policy_gradient=True)  # fmt: skip
    assert (len(trained.samples), trained.dropped, trained.zero_variance_groups) == (16, 32, pytest.approx(4 / 6))


def test_the_limit_ends_the_search_and_the_surplus_is_cut(start: Any, policy_engine: PolicyEngine) -> None:
    project = start(operators=refilled(2))
    note = explore(project, policy_engine, serving(policy_engine), 1)
    assert (note.figures["groups_sampled"], note.figures["groups_with_signal"]) == (4, 1)
    assert judge(project, 1).figures["rows_with_signal"] == 8
    note = explore(project, policy_engine, serving(policy_engine), 2)  # mixed, hard; mixed, mixed
    assert (note.figures["groups_sampled"], note.figures["groups_with_signal"], note.figures["groups_surplus"]) == (
        4,
        3,
        1,
    )
    report = judge(project, 2)
    assert (report.figures["dropped_rows"], report.operators[-1].facts) == (16, {"surplus_groups": 1.0})
    rows = {row.row_id: row for row in project.store.rollout_rows(2)}
    last = {rows[row.row_id].task_id for row in judged_rows(project, 2) if row.dropped_by == "surplus_groups"}
    assert last == {note.task_selection.tasks[1][1]}, "what was sampled last is cut"


def judged_rows(project: Project, round_number: int) -> list[JudgedRow]:
    from rft_platform.experience.schema import table_to_judged

    return table_to_judged(project.store.read_judged(round_number))


def test_what_one_batch_finds_beyond_its_need_counts_for_the_next_of_the_round(
    start: Any, policy_engine: PolicyEngine
) -> None:
    project = start(operators=refilled(3), interval=2)
    note = explore(project, policy_engine, serving(policy_engine), 1)
    assert kinds(project, note) == [
        ["easy", "hard"], ["mixed", "easy"], ["mixed", "hard"],
        ["mixed", "mixed"],
    ]  # fmt: skip
    assert (note.figures["groups_wanted"], note.figures["groups_with_signal"]) == (4, 4)
    assert project.store.batches(1) == [0, 1]


@pytest.mark.slow
def test_a_killed_exploration_that_is_repeated_gives_the_same_rows(start: Any, policy_engine: PolicyEngine) -> None:
    whole, killed = start("whole", refilled(3)), start("killed", refilled(3))
    policy = serving(policy_engine)
    explore(whole, policy_engine, policy, 1)
    asked = 0
    generate = policy_engine.generate

    class Dying:
        """The engine, until its second batch of tasks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(policy_engine, name)

        def generate(self, *args: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 2:
                raise KeyboardInterrupt
            return generate(*args, **options)

    with pytest.raises(KeyboardInterrupt):
        explore(killed, Dying(), policy, 1)
    assert read(killed.store, 1).explored is None and killed.store.batches(1) == [0]
    assert {row.group_id[:10] for row in killed.store.rollout_rows(1)} == {"r0001-b000"}, "stored before it was judged"
    for _ in range(2):
        explore(killed, policy_engine, policy, 1)
        same = [
            [(row.row_id, row.task_id, row.response_ids) for row in project.store.rollout_rows(1)]
            for project in (whole, killed)
        ]
        assert same[0] == same[1]
    judge(whole, 1)
    assert explore(whole, policy_engine, policy, 1).task_selection == (read(killed.store, 1).explored.task_selection)


@pytest.mark.slow
def test_a_judge_that_is_out_costs_no_rollouts(
    start: Any, policy_engine: PolicyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, interrupted, policy = start("whole", refilled(3)), start("out", refilled(3)), serving(policy_engine)
    explore(whole, policy_engine, policy, 1)
    judged, sampled = [], []

    def out(*args: Any, **options: Any) -> Any:
        judged.append(1)
        if len(judged) == 2:
            raise JudgeUnavailableError("the judge is out")
        return judge_tasksets(*args, **options)

    class Counting:
        """The engine, which counts how often it is asked."""

        def __getattr__(self, name: str) -> Any:
            return getattr(policy_engine, name)

        def generate(self, *args: Any, **options: Any) -> Any:
            sampled.append(1)
            return policy_engine.generate(*args, **options)

    monkeypatch.setattr("rft_platform.rounds.selection.task_selection.judge_tasksets", out)
    with pytest.raises(JudgeUnavailableError):
        explore(interrupted, Counting(), policy, 1)
    assert len(sampled) == 2 and len(interrupted.store.rollout_rows(1)) == 32
    again = explore(interrupted, Counting(), policy, 1)
    assert len(sampled) == 3, "what was stored is not sampled again"
    assert explore(interrupted, Counting(), policy, 1) == read(interrupted.store, 1).explored
    assert len(sampled) == 3, "nor is a round that only lacks its judgement"
    counted = ("runs", "rows", "failed", "dropped_groups", "completion_tokens", "task_selection", "groups_with_signal")
    assert {name: all_figures(again)[name] for name in counted} == {
        name: all_figures(read(whole.store, 1).explored)[name] for name in counted
    }
    rows = [[(r.row_id, r.response_ids) for r in project.store.rollout_rows(1)] for project in (whole, interrupted)]
    assert rows[0] == rows[1]

    other = start("other", refilled(3))
    newer = [replace(row, call=replace(row.call, policy_version=9)) for row in whole.store.rollout_rows(1)]
    other.store.write_rollouts(1, 0, newer)
    explore(other, policy_engine, policy, 1)
    assert {row.policy_version for row in other.store.rollout_rows(1)} == {policy.policy_version}


@pytest.mark.slow
def test_difficulty_follows_the_outcomes_of_the_rounds_behind_the_policy(
    start: Any, policy_engine: PolicyEngine
) -> None:
    project = start(
        selector_type="difficulty_based",
        args={"width": 0.4, "how": "probability"},
        operators=[{"name": "pass_rate_calculator"}],
        interval=6,
    )
    first = explore(project, policy_engine, serving(policy_engine), 1)
    assert sorted(chain.from_iterable(kinds(project, first))) == sorted(KINDS), "nothing is known: every task once"
    assert judge(project, 1).operators[0].facts["solved_tasks"] == 3.0
    found = {task: (runs, passes) for task, number, runs, passes in task_outcomes(project.store, [1])}
    by_id = project.tasks.by_id()
    assert all(runs == 8 for runs, _ in found.values())
    passes = {kind: [won for task, (_, won) in found.items() if by_id[task].raw["kind"] == kind] for kind in set(KINDS)}
    assert passes["easy"] == [8.0] * 3 and passes["hard"] == [0.0] * 3 and all(0 < p < 8 for p in passes["mixed"])

    informed = TaskSelection(project, 2, policy_round=1)
    taken = [by_id[task.task_id].raw["kind"] for _ in range(3) for task in informed.next()]
    assert taken == ["mixed"] * 6, "the tasks with an open outcome come before the settled ones"
    assert informed.taken().statistics["selected_tried"] == 2.0
    unknowing = TaskSelection(project, 2, policy_round=0)
    assert [unknowing.next() for _ in range(3)] != [informed.next() for _ in range(3)]
    assert unknowing.taken().statistics["tried_tasks"] == 0.0, "round 1 stands not behind the policy of round 0"

    explore(project, policy_engine, serving(policy_engine, 1), 2)
    judge(project, 2)
    again = TaskSelection(project, 2, policy_round=1)
    assert [[t.task_id for t in again.next()] for _ in range(6)] == read(
        project.store, 2
    ).explored.task_selection.tasks, "what was stored since changes nothing"
