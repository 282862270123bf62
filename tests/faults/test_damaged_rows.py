"""Rows that are not what was written stop judging and training before a step is made of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from rft_platform.common.errors import DamageRepairedError, StorageError, UserError
from rft_platform.experience.record import RolloutRow
from rft_platform.rounds.judge import judge
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Policy, RoundEvaluation, publish, write
from rft_platform.rounds.round import Round
from rft_platform.rounds.train import train
from tests.support.builders import flip_a_byte

from .conftest import round_rows


@pytest.fixture
def explored(project: Project) -> Project:
    """A project whose first round is explored and judged."""
    publish(project.store, Policy("base", 0, "d0", 0))
    write(project.store, 0, RoundEvaluation())
    project.store.write_rollouts(1, 0, round_rows(project))
    write(project.store, 1, Explored(rows=4))
    assert judge(project, 1).sound
    return project


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("harm", [flip_a_byte, cut_short, Path.unlink])
def test_damaged_rollouts_are_reported_quarantined_and_explored_again(explored: Project, harm):
    (file,) = explored.store.rollout_files(1)
    harm(file)
    with pytest.raises(DamageRepairedError, match="the exploration of r0001 is repeated") as told:
        train(explored, None, 1, "run")
    assert str(file) in str(told.value)
    assert told.value.retryable
    assert not file.exists()
    assert explored.store.rollout_rows(1) == []
    plan = plan_next(observe(explored, Launches()))
    assert [(action.kind, action.round) for action in plan.actions] == [("explore", 1)]


def test_a_judgement_that_is_damaged_is_made_again_without_a_word_to_the_rollouts(explored: Project):
    file = explored.store.judged_file(1)
    flip_a_byte(file)
    with pytest.raises(DamageRepairedError):
        train(explored, None, 1, "run")
    assert len(explored.store.rollout_rows(1)) == 4
    assert judge(explored, 1).sound
    assert explored.store.judged_file(1) == file


def test_a_missing_judgement_does_not_keep_the_plan_from_mending_it(explored: Project):
    explored.store.judged_file(1).unlink()
    state = observe(explored, Launches())
    assert [(action.kind, action.round) for action in plan_next(state).actions] == [("sync", 1)]
    with pytest.raises(DamageRepairedError, match="is missing"):
        train(explored, None, 1, "run")
    assert [(action.kind, action.round) for action in plan_next(observe(explored, Launches())).actions] == [
        ("explore", 1)
    ]


def test_a_round_without_a_judgement_in_force_is_not_trained(explored: Project):
    (explored.store.judged_file(1).parent / "current.json").unlink()
    with pytest.raises(StorageError, match=r"r0001 has no judgement in force.*launch judge_job for r0001"):
        train(explored, None, 1, "run")


def test_an_unused_judgement_of_a_trained_round_is_quarantined_with_a_warning(explored: Project, caplog):
    publish(explored.store, Policy("checkpoint", 2, "d2", 1))
    in_force, rows = explored.store.judged_file(1), explored.store.judged_rows(1)
    others = [replace(row, judge_version="other") for row in rows]
    spare = explored.store.write_judged(1, "other", others, make_current=False)
    flip_a_byte(spare)
    assert judge(explored, 1).sound
    assert f"{spare} was changed after it was written" in caplog.text
    assert not spare.exists()
    assert explored.store.judged_files(1) == [in_force]


def test_the_judgement_in_force_of_a_round_that_has_trained_is_left_to_a_person(explored: Project):
    publish(explored.store, Policy("checkpoint", 2, "d2", 1))
    flip_a_byte(explored.store.judged_file(1))
    with pytest.raises(StorageError, match="was trained on it: to create it again, launch judge_job for r0001"):
        judge(explored, 1)
    assert judge(explored, 1).sound


def test_rows_of_a_round_that_has_trained_are_left_to_a_person(explored: Project):
    publish(explored.store, Policy("checkpoint", 2, "d2", 1))
    flip_a_byte(explored.store.rollout_files(1)[0])
    with pytest.raises(StorageError, match="launch explore_job for r0001") as told:
        judge(explored, 1)
    assert not told.value.retryable


def test_a_round_with_a_successor_is_not_trained_again(explored: Project):
    publish(explored.store, Policy("checkpoint", 2, "d2", 1))
    publish(explored.store, Policy("later", 4, "d4", 2))
    with pytest.raises(UserError, match="r0001 cannot be trained again, because the next round"):
        Round(explored, 1, "run").train(None, None)


def test_an_unsound_judgement_is_kept_but_not_in_force(project: Project):
    rows: list[RolloutRow] = round_rows(project)
    project.store.write_rollouts(1, 0, rows[:-1])  # the last task lacks a run: its group is incomplete
    summary = judge(project, 1)
    assert not summary.sound
    assert project.store.judge_version(1) is None
    assert project.store.judged_file(1) is None
    assert len(project.store.judged_files(1)) == 1
    plan = plan_next(observe(project, Launches(), now=0.0))
    assert "sync" not in {action.kind for action in plan.actions}
