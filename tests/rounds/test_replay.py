"""Replay: which rows are served again, in which order, and how often each was used."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import ROWS, simulated

from rft_platform.common.errors import UserError
from rft_platform.config.schema.buffer import ReplayBuffer
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.selection import row_selection
from rft_platform.rounds.selection.row_selection import (
    Group,
    by_priority,
    linear_decay,
    priority_of,
    replayable_rows,
    used_groups,
)


def group(version: int, uses: int, round_number: int = 1) -> Group:
    return Group(round_number, f"{version}-{uses}", "v", version, ("row",), (), uses)


def test_an_unused_older_group_precedes_a_used_newer_one() -> None:
    assert (linear_decay(5, 1, 2.0), linear_decay(4, 0, 2.0)) == (3.0, 4.0)
    served = by_priority([group(5, 1), group(4, 0), group(5, 0), group(9, 2)], priority_of(ReplayBuffer()))
    assert [(one.policy_version, one.uses) for one in served] == [(5, 0), (9, 2), (4, 0), (5, 1)]


def test_a_custom_priority_function(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def oldest_first(model_version, use_count, decay):\n    return -model_version - use_count\n")
    mine = priority_of(ReplayBuffer(priority_fn=f"{code}:oldest_first"))
    assert [one.policy_version for one in by_priority([group(5, 0), group(4, 0)], mine)] == [4, 5]
    with pytest.raises(UserError, match="expected one of linear_decay"):
        priority_of(ReplayBuffer(priority_fn="newest"))


def test_used_rows_fill_a_step_and_their_uses_are_counted(tmp_path: Path) -> None:
    world = simulated(tmp_path, 3, train_batch_size=2 * ROWS, replay={"enable": True}, sync_style="fixed")
    world.explore(1)
    assert world.train(1).rows["fresh"] == ROWS, "nothing trained before"
    world.explore(2)
    second = world.train(2)
    assert (second.rows["fresh"], second.rows["replay"], second.steps) == (ROWS, ROWS, 1)
    assert {(row["round"], row["uses"]) for row in world.selected(2)} == {(2, 0), (1, 1)}
    world.explore(3)
    world.train(3)
    again = [row for row in world.selected(3) if row["use"] == "replay"]
    assert {(row["round"], row["uses"]) for row in again} == {(2, 1)}, "version 1 used once before version 0 used twice"
    assert {(g.round, g.uses) for g in used_groups(world.project, 4)} == {(1, 2), (2, 2), (3, 1)}


def test_used_rows_are_excluded_during_the_cooldown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = {"enable": True, "reuse_cooldown_time": 60}
    world = simulated(tmp_path, 3, train_batch_size=2 * ROWS, replay=replay, sync_style="fixed")
    world.explore(1)
    world.train(1)
    assert used_groups(world.project, 2) == []
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert len(used_groups(world.project, 2)) == 2


def test_what_may_be_used_again_counts_as_experience(tmp_path: Path) -> None:
    style = {"sync_style": "dynamic_by_explorer", "sync_interval": 4}
    world = simulated(tmp_path, 4, train_batch_size=2 * ROWS, replay={"enable": True}, **style)
    for number in (1, 2):
        world.explore(number)
    assert world.train(1).rows["fresh"] == 2 * ROWS
    assert not [action for action in plan_next(world.state()).actions if action.kind == "sync"], "nothing new landed"
    world.explore(3)
    assert [action.kind for action in plan_next(world.state()).actions] == ["sync", "explore"]
    assert world.train(2).rows == {"fresh": ROWS, "replay": ROWS, "filtered": 0, "stale": 0}


def test_what_is_too_old_to_be_used_again_counts_as_nothing(tmp_path: Path) -> None:
    style = {"sync_style": "dynamic_by_explorer", "sync_interval": 1, "max_staleness": 0}
    world = simulated(tmp_path, 6, train_batch_size=2 * ROWS, replay={"enable": True}, **style)
    for number in (1, 2):
        world.explore(number)
    assert world.train(1).rows["fresh"] == 2 * ROWS
    world.explore(3)
    assert world.state().landed.replayable == 0, "sampled by version 0, and version 1 trains"
    assert [action.kind for action in plan_next(world.state()).actions] == ["explore"], "it waits for a whole step"
    world.explore(4)
    assert world.settle(2).rows == {"fresh": 2 * ROWS, "replay": 0, "filtered": 0, "stale": 0}
    assert replayable_rows(world.project, 3) == 0, "also while the training before is under way"


def test_rows_that_may_be_used_again_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = simulated(tmp_path, 6, train_batch_size=2 * ROWS, replay={"enable": True}, sync_style="dynamic_by_explorer")
    for number in (1, 2):
        world.explore(number)
    world.train(1)
    world.explore(3)
    assert replayable_rows(world.project, 2) == 2 * ROWS
    with monkeypatch.context() as reading:
        for module, name in ((row_selection, "read_selection"), (row_selection, "groups_of")):
            reading.setattr(module, name, lambda *_: pytest.fail("read again"))
        assert replayable_rows(Project.open(world.project.home), 2) == 2 * ROWS, "another tick"
    judged = world.store.judged_rows(2)
    world.store.write_judged(2, "w", [replace(row, judge_version="w", dropped_by="too_long") for row in judged])
    assert replayable_rows(world.project, 2) == ROWS, "a new judgement is read"
