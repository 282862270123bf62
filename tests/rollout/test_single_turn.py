"""Single-turn workflows: one engine call for the whole batch, no HTTP."""

import math
from dataclasses import replace

import pytest

from rft_platform.common.errors import EngineError, UserCodeError
from rft_platform.experience.record import row_id
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine, decode, render
from .samples import roll_out, tasks


def explore(engine: FakeEngine, count: int = 3, **options: object) -> RolloutBatch:
    settings = {"round": 2, "batch": 1, "repeat_times": 4, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, tasks(count), SingleTurn("be brief"), **settings)  # type: ignore[arg-type]


@pytest.fixture
def offline() -> FakeEngine:
    """The fake engine without its HTTP server: a call would fail."""
    return FakeEngine()


def test_rows_carry_what_the_engine_sampled(offline: FakeEngine) -> None:
    batch = explore(offline)
    assert len(batch.rows) == 12
    row = batch.rows[5]
    assert row.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "question 1"}]
    assert row.prompt_ids == [ord(c) for c in render(row.messages)]
    assert decode(row.response_ids) == row.response["content"] == row.run_output
    assert len(row.response_ids) == len(row.rollout_logprobs) == len(row.loss_mask) and all(row.loss_mask)
    assert (row.task_id, row.round, row.policy_version, row.engine) == ("task-1", 2, 7, "fake-1")
    assert row.row_id == row_id(row.run_id, 0)
    assert len({r.group_id for r in batch.rows}) == 3 and len({r.run_id for r in batch.rows}) == 12


def test_same_place_same_rows(offline: FakeEngine) -> None:
    def identity(batch: RolloutBatch) -> list[tuple[str, list[int]]]:
        return [(row.row_id, row.response_ids) for row in batch.rows]

    first = identity(explore(offline))
    assert identity(explore(offline)) == first
    for other in (explore(offline, seed=1), explore(offline, round=3), explore(offline, batch=2)):
        assert all(ids not in [ids for _, ids in first] for _, ids in identity(other))


def test_report(offline: FakeEngine) -> None:
    told: list[tuple[int, int]] = []
    report = explore(
        offline, sampling=SamplingParams(max_tokens=5), on_progress=lambda done, total: told.append((done, total))
    ).report
    assert (report.runs, report.rows, report.failed, report.dropped_groups) == (12, 12, 0, 0)
    assert (report.completion_tokens, report.truncated_share) == (60, 1.0)
    assert report.policy_versions == (7,) and told == [(12, 12)]
    assert math.isclose(report.tokens_per_s, 60 / report.seconds)
    assert report.as_dict()["policy_versions"] == [7]


@pytest.mark.parametrize(("policy", "rows", "dropped"), [("complete", 8, 1), ("drop", 8, 1), ("partial", 11, 0)])
def test_aborted_answers_follow_the_group_policy(offline: FakeEngine, policy: str, rows: int, dropped: int) -> None:
    offline.abort = {render(SingleTurn("be brief").messages(tasks(3)[1]))}
    batch = explore(offline, group_policy=policy)
    assert (len(batch.rows), batch.report.failed, batch.report.dropped_groups) == (rows, 1, dropped)
    assert all(row.finish_reason != "abort" for row in batch.rows)


def test_dead_engine(offline: FakeEngine) -> None:
    offline.dead = True
    with pytest.raises(EngineError):
        explore(offline)


def test_a_batch_without_tasks_has_no_rows(offline: FakeEngine) -> None:
    assert explore(offline, count=0).rows == []


def test_a_prompt_beyond_the_limit_fails_alone(offline: FakeEngine) -> None:
    lengths = [len(render(SingleTurn("be brief").messages(task))) for task in long_and_short()]
    batch = roll_out(offline, long_and_short(), SingleTurn("be brief"), max_prompt_tokens=min(lengths))
    assert [row.task_id for row in batch.rows] == ["task-0", "task-0"]
    assert (batch.report.failed, batch.report.dropped_groups) == (2, 1)
    (reason,) = batch.report.errors
    assert f"more than {min(lengths)} tokens: shorten the prompts or raise model.max_prompt_tokens" in reason
    with pytest.raises(UserCodeError, match=r"raise model\.max_prompt_tokens$"):
        explore(offline, max_prompt_tokens=1)


def long_and_short() -> list[Task]:
    short, long = tasks(2)
    return [short, replace(long, prompt=long.prompt * 9)]
