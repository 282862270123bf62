"""Explore batches that overlap: a batch ends with enough complete groups, and the next one continues the others."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.record import RolloutRow
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.rounds.explore import explore
from rft_platform.rounds.judge import judge
from rft_platform.rounds.maintenance.row_erasure import erase_rows
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Policy, read, withdraw
from rft_platform.rounds.reporting.lineage import trace_row
from rft_platform.rounds.selection.row_selection import choose, groups_of
from rft_platform.training.data.rollout_rows import read_rollouts
from tests.support.builders import problems

ROUNDS, SIZE, RUNS, LONGEST = 5, 3, 4, 90


def settings(model: Path, tasks: Path, **explorer: Any) -> dict[str, Any]:
    return {
        "model": {"model_path": str(model), "max_model_len": 128, "max_response_tokens": LONGEST},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": RUNS},
        "buffer": {
            "batch_size": SIZE,
            "total_steps": ROUNDS,
            "explorer_input": {
                "taskset": {
                    "path": str(tasks),
                    "judge": "exact_match",
                    "task_selector": {"selector_type": "sequential"},
                }
            },
        },
        "explorer": {"batches_in_flight": 2, **explorer},
    }


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Questions of many lengths: the untrained model rarely ends an answer, so the context does it."""
    file, rng = tmp_path / "tasks.jsonl", random.Random(1)
    rows = [{"question": f"{i} is 1{' + 1' * rng.randrange(24)}?", "answer": str(i)} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, tasks: Path) -> Project:
    return Project(Home(tmp_path / "home"), build_config(settings(tiny_model, tasks)))


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyEngine]:
    """An engine of its own, because the tests change its weights; its context ends most answers."""
    cluster = Home(tmp_path_factory.mktemp("in-flight-engine")).cluster
    spec = EngineSpec(dtype="float32", device="cpu", max_model_len=128)
    with find_or_start_engine(tiny_model, cluster, spec) as found:
        yield found
        found.shutdown()


def explore_round(project: Project, engine: PolicyEngine, number: int, version: int | None = None) -> Explored:
    """Explore with the same weights under another version, so that one engine can check every token."""
    status = engine.status()
    policy = Policy(
        status.weights_path, status.policy_version if version is None else version, status.weights_digest, 0
    )
    return explore(project, engine, policy, number)


def contents(rows: list[RolloutRow]) -> list[tuple[str, list[int], list[int]]]:
    return [(row.run_id, row.call.response_ids, row.call.token_versions) for row in rows]


def test_every_batch_gives_its_groups_and_no_task_is_lost_or_doubled(project: Project, engine: PolicyEngine) -> None:
    notes = [explore_round(project, engine, number, number - 1) for number in range(1, ROUNDS + 1)]
    assert [note.rows for note in notes] == [SIZE * RUNS] * ROUNDS
    assert [note.figures["runs"] for note in notes] == [SIZE * RUNS] * ROUNDS
    assert [note.figures["failed"] for note in notes] == [0] * ROUNDS
    assert [note.figures["unfinished_groups"] for note in notes] == [SIZE] * (ROUNDS - 1) + [0]
    assert [note.task_selection.batches for note in notes] == [2, *[1] * (ROUNDS - 2), 0], "the first one takes two"
    rows = [row for number in range(1, ROUNDS + 1) for row in project.store.rollout_rows(number)]
    assert Counter(Counter(row.task_id for row in rows).values()) == {RUNS: SIZE * ROUNDS}
    assert {row.task_id for row in rows} == {task.task_id for task in project.tasks.tasks[: SIZE * ROUNDS]}
    assert len({row.row_id for row in rows}) == len(rows)
    assert all(row.call.finish_reason in ("stop", "length") and row.run_output is not None for row in rows)


def test_continued_answers_have_the_version_and_the_logprob_of_each_token(
    project: Project, engine: PolicyEngine
) -> None:
    notes = [explore_round(project, engine, number, number - 1) for number in range(1, ROUNDS + 1)]
    rows = [row for number in range(1, ROUNDS + 1) for row in project.store.rollout_rows(number)]
    continued = [row for row in rows if row.call.token_versions]
    assert len(continued) == sum(note.figures["continued_rows"] for note in notes) > 0
    for row in rows:
        versions = row.call.token_versions or [row.call.policy_version]
        assert versions == sorted(versions) and versions[-1] == row.call.policy_version <= row.round - 1
        assert len(row.call.response_ids) <= LONGEST
    sequences = [row.call.prompt_ids + row.call.response_ids for row in continued]
    for row, scores in zip(continued, engine.score(sequences), strict=True):
        assert np.allclose(scores[len(row.call.prompt_ids) :], row.call.rollout_logprobs, atol=1e-4)


def test_the_trace_of_a_continued_row_names_the_versions(project: Project, engine: PolicyEngine) -> None:
    for number in (1, 2):
        explore_round(project, engine, number, number - 1)
    row = next(row for row in project.store.rollout_rows(2) if row.call.token_versions)
    found = trace_row(row.row_id, project.store, project.checkpoints)
    assert found.token_versions == row.call.token_versions and set(found.token_versions) == {0, 1}


def test_a_repeated_round_takes_the_stored_batch_or_samples_the_same(project: Project, engine: PolicyEngine) -> None:
    for number in (1, 2):
        explore_round(project, engine, number, number - 1)
    store, found = project.store, contents(project.store.rollout_rows(2))
    unfinished = contents(store.unfinished_rows(2, 0))
    withdraw(store, 2, Explored)
    explore_round(project, engine, 2, 1)
    assert contents(store.rollout_rows(2)) == found
    withdraw(store, 2, Explored)  # as after a crash between the two files
    with store.ledger(2).change() as ledger:
        del ledger.files["rollouts/batch-0000.parquet"]
    explore_round(project, engine, 2, 1)
    assert contents(store.rollout_rows(2)) == found and contents(store.unfinished_rows(2, 0)) == unfinished


def test_a_repeated_round_takes_a_stored_batch_with_answers_that_ended_under_earlier_weights(
    project: Project, engine: PolicyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    explore_round(project, engine, 1, 0)
    store = project.store
    unfinished = store.unfinished_rows(1, 0)
    begun = [row for row in unfinished if row.call.response_ids]
    for row in begun[:2]:  # two answers ended before the batch did
        row.call.finish_reason = "length"
    store.write_unfinished(1, 0, unfinished)
    explored = explore_round(project, engine, 2, 1)
    rows = store.rollout_rows(2)
    assert {row.call.policy_version for row in rows} == {0, 1}

    def refuse(*arguments: Any) -> None:
        pytest.fail("the stored batch was sampled again")

    monkeypatch.setattr(engine, "generate", refuse)
    assert explore_round(project, engine, 2, 1) == explored, "only the judgement is missing"
    withdraw(store, 2, Explored)
    assert explore_round(project, engine, 2, 1).rows == explored.rows
    assert contents(store.rollout_rows(2)) == contents(rows)
    monkeypatch.undo()
    explore_round(project, engine, 2, 2)  # other weights: the answers that ended earlier are the only ones that stay
    assert {row.call.policy_version for row in store.rollout_rows(2)} == {0, 2}


def test_tokens_that_are_too_old_are_not_continued(
    tmp_path: Path, tiny_model: Path, tasks: Path, engine: PolicyEngine
) -> None:
    config = build_config({**settings(tiny_model, tasks), "synchronizer": {"max_staleness": 3}})
    project = Project(Home(tmp_path / "home"), config)
    explore_round(project, engine, 1, 0)
    second = explore_round(project, engine, 2, 4)
    assert second.figures["continued_rows"] == 0 and second.task_selection.batches == 2
    assert explore_round(project, engine, 3, 5).figures["continued_rows"] > 0


def test_the_selection_counts_the_age_of_the_oldest_token(
    tmp_path: Path, tiny_model: Path, tasks: Path, engine: PolicyEngine
) -> None:
    config = build_config({**settings(tiny_model, tasks), "synchronizer": {"max_staleness": 2}})
    project = Project(Home(tmp_path / "home"), config)
    for number in (1, 2):
        explore_round(project, engine, number, 3 + number)
    judge(project, 2)
    oldest: dict[str, int] = {}
    for row in project.store.rollout_rows(2):
        versions = row.call.token_versions or [row.call.policy_version or 0]
        oldest[row.group_id] = min(*versions, oldest.get(row.group_id, 5))
    assert set(oldest.values()) == {4, 5}
    assert {group.group_id: group.policy_version for group in groups_of(project.store, 2)} == oldest
    chosen, _ = choose(project, 2, Policy("", 7, "", 1))
    assert {group.policy_version for group in chosen.stale} == {4}
    assert {group.policy_version for group in chosen.fresh} == {5}


def test_answers_that_would_be_too_old_for_their_training_are_not_continued(
    tmp_path: Path, tiny_model: Path, tasks: Path, engine: PolicyEngine
) -> None:
    sync = {"sync_offset": 1, "max_staleness": 3}  # a training begins from a version that is one step ahead
    given = settings(tiny_model, tasks)
    project = Project(Home(tmp_path / "home"), build_config({**given, "synchronizer": sync}))
    steps = project.batches.steps_a_round
    explore_round(project, engine, 1, 0)
    assert explore_round(project, engine, 2, 3 - steps).figures["continued_rows"] > 0
    assert explore_round(project, engine, 3, 3 - steps + 3).figures["continued_rows"] == 0


def test_a_limit_that_no_continued_answer_can_meet_is_refused(tiny_model: Path, tasks: Path) -> None:
    given = settings(tiny_model, tasks)
    steps = Project(Home(tasks.parent / "home"), build_config(given)).batches.steps_a_round

    def found(limit: int, offset: int) -> list[str]:
        sync = {"sync_offset": offset, "max_staleness": limit}
        return [each for each in problems(build_config({**given, "synchronizer": sync})) if "batches_in_flight" in each]

    assert found(2 * steps, 1) == []
    (problem,) = found(2 * steps - 1, 1)
    assert f"set max_staleness to {2 * steps} or more" in problem


def test_a_damaged_or_erased_file_of_unfinished_answers_only_costs_these_answers(
    project: Project, engine: PolicyEngine
) -> None:
    explore_round(project, engine, 1, 0)
    (file,) = project.store.round_folder(1).glob("unfinished/*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert explore_round(project, engine, 2, 1).rows == SIZE * RUNS
    assert read(project.store, 1).has(Explored)
    row = project.store.rollout_rows(2)[0]
    erase_rows(project.store, 2, {row.row_id}, lambda name: name)
    assert project.store.unfinished_rows(2, 0) == []
    assert explore_round(project, engine, 3, 2).rows == SIZE * RUNS


def test_the_trainer_counts_the_age_of_the_oldest_token(project: Project, engine: PolicyEngine) -> None:
    for number in (1, 2):
        explore_round(project, engine, number, number - 1)
    judge(project, 2)
    store = project.store
    rows = read_rollouts([str(f) for f in store.rollout_files(2)], [str(store.judged_file(2))], policy_gradient=True)
    oldest = [min(row.call.token_versions or [row.call.policy_version or 0]) for row in store.rollout_rows(2)]
    assert rows.facts["policy_version"].tolist() == oldest
    assert min(oldest) == 0 and any(row.call.token_versions for row in store.rollout_rows(2))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"algorithm": {"algorithm_type": "remax"}}, "decodes a greedy answer"),
        ({"algorithm": {"algorithm_type": "dapo"}}, "dynamic sampling"),
        ({"workflow": "calculator"}, "the workflow single_turn alone"),
    ],
)
def test_settings_that_exclude_overlapping_batches_are_refused(
    tmp_path: Path, tiny_model: Path, tasks: Path, change: dict[str, Any], expected: str
) -> None:
    given = settings(tiny_model, tasks)
    if workflow := change.pop("workflow", None):
        given["buffer"]["explorer_input"]["taskset"]["workflow"] = workflow
    (problem,) = [each for each in problems(build_config({**given, **change})) if "batches_in_flight" in each]
    assert problem.startswith("explorer.batches_in_flight 2: ") and expected in problem
