"""The dynamic styles on real notes: whatever runs when and is killed, each row trains once, nothing waits for ever."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import ROWS, Simulated, simulated

from rft_platform.experience.selections import TRAINED_ON
from rft_platform.rounds.evaluate import is_due
from rft_platform.rounds.maintenance.checkpoint_retention import in_use
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.project.record import Judged, read, withdraw

STYLES = ("dynamic_by_explorer", "dynamic_by_trainer")


def waits(world: Simulated, *running: tuple[str, int]) -> str:
    return "; ".join(plan_next(world.state(*running)).waiting)


def launches(world: Simulated, *running: tuple[str, int]) -> list[tuple[str, int]]:
    return [(action.kind, action.round) for action in plan_next(world.state(*running)).actions]


def drive(world: Simulated, data: st.DataObject) -> None:
    """Let jobs start, end and die in any order, until the plan says that all is done."""
    running: set[tuple[str, int]] = set()
    for _ in range(400):
        plan = plan_next(world.state(*running))
        assert plan.failed is None
        if plan.finished:
            assert not running
            return
        may_start = [(action.kind, action.round) for action in plan.actions]
        assert running or may_start, f"nothing runs and nothing may start: {plan.waiting}"
        assert not set(may_start) & running
        events = [("start", job) for job in may_start] + [(how, job) for job in sorted(running) for how in ENDS]
        what, job = data.draw(st.sampled_from(events))
        if what == "start":
            running.add(job)
            continue
        running.remove(job)
        kind, number = job
        if what == "killed":
            if kind == "sync":
                world.settle(number)  # it got as far as that
        elif kind == "explore":
            dropped = data.draw(st.sets(st.integers(0, ROWS - 1), max_size=ROWS))
            world.explore(number, dropped.__contains__)
        else:
            world.train(number)
    raise AssertionError("no end in sight")


ENDS = ("ended", "ended", "ended", "killed")


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_every_row_is_trained_once_or_left_out_for_a_reason(data: st.DataObject) -> None:
    style, batches = data.draw(st.sampled_from(STYLES)), data.draw(st.integers(1, 5))
    limit = data.draw(st.none() | st.integers(0, 3))
    replay = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        world = simulated(
            Path(folder), batches, train_batch_size=data.draw(st.sampled_from([2, 3, 4, 6, 10])),
            replay={"enable": replay}, sync_style=style, sync_interval=data.draw(st.integers(1, 3)),
            sync_offset=data.draw(st.integers(0, 3)), max_staleness=limit,
        )  # fmt: skip
        drive(world, data)
        trainings = world.trainings()
        assert trainings == list(range(1, len(trainings) + 1)) and len(trainings) <= batches
        firsts: Counter[str] = Counter()
        for number in trainings:
            rows, parent = world.selected(number), 0 if number == 1 else version_of(world, number - 1)
            ids = [row["row_id"] for row in rows]
            assert len(set(ids)) == len(ids), "a training takes a row once"
            firsts.update(row["row_id"] for row in rows if row["use"] != "replay")
            used = [row for row in rows if row["use"] in TRAINED_ON]
            assert all(limit is None or parent - row["policy_version"] <= limit for row in used)
            assert replay or all(row["uses"] == 0 for row in rows)
        every = {f"{number}-{row}": 1 for number in range(1, batches + 1) for row in range(ROWS)}
        assert firsts == every, "each row was taken for the first time once, whatever became of it"
        assert world.state().landed.rounds == 0


def version_of(world: Simulated, number: int) -> int:
    note = read(world.store, number).published()
    return note.policy_version


def test_by_explorer_trains_what_landed_and_takes_newer_weights_every_interval(tmp_path: Path) -> None:
    world = simulated(tmp_path, 5, train_batch_size=6, sync_style="explorer_driven", sync_interval=2)
    assert launches(world) == [("explore", 1)]
    assert "r0001 waits: 0 of 6 experiences have landed" in waits(world)
    world.explore(1)
    assert launches(world) == [("explore", 2)], "it never waits for training"
    assert "r0001 waits: 4 of 6 experiences have landed" in waits(world)
    world.explore(2)
    assert launches(world) == [("sync", 1), ("explore", 3)]
    note = world.train(1)
    assert (note.rows["fresh"], note.steps, note.fresh_rounds) == (8, 2, [1, 2]), "as they are, not padded"
    assert world.explore(3).policy_version == 2
    assert world.explore(4).policy_version == 2
    world.train(2)
    assert launches(world) == [("explore", 5)]
    assert world.explore(5).policy_version == version_of(world, 2), "the interval is over, and there are newer ones"
    assert launches(world) == [("sync", 3)], "the rest of the run trains as it is"
    last = world.train(3)
    assert (last.rows["fresh"], last.steps, last.last) == (4, 1, True)
    assert plan_next(world.state()).finished


def test_between_two_intervals_the_explorer_keeps_its_weights(tmp_path: Path) -> None:
    world = simulated(tmp_path, 4, sync_style="dynamic_by_explorer", sync_interval=3)
    world.explore(1)
    world.train(1)
    assert [world.explore(n).policy_version for n in (2, 3)] == [0, 0]
    assert world.explore(4).policy_version == 1


def test_weights_of_the_next_batch_are_kept(tmp_path: Path) -> None:
    world = simulated(tmp_path, 6, sync_style="dynamic_by_explorer", sync_interval=3)
    for number in range(1, 6):
        world.explore(number)
        world.train(number)
    used = {folder.name for folder in in_use(world.project)}
    assert used == {"v0", "v3"}, "batch 6 is the last of the interval that began with v3"


def test_by_trainer_publishes_every_interval_of_steps_and_explores_batch_by_batch(tmp_path: Path) -> None:
    world = simulated(tmp_path, 4, train_batch_size=2, sync_style="dynamic_by_trainer", sync_interval=3)
    world.explore(1)
    assert "r0001 waits: 4 of 6 experiences have landed" in waits(world)
    world.explore(2)
    note = world.train(1)
    assert (note.rows["fresh"], note.steps, note.left) == (6, 3, {2: 2}), "three steps, no more"
    assert world.explore(3).policy_version == 3, "the newest weights with every batch"
    note = world.train(2)
    assert (note.rows["fresh"], note.steps, note.fresh_rounds) == (6, 3, [2, 3])
    world.explore(4)
    assert launches(world) == [("sync", 3)], "no more will come"
    assert world.train(3).last
    assert plan_next(world.state()).finished


def test_a_killed_training_takes_the_same_rows_again(tmp_path: Path) -> None:
    world = simulated(tmp_path, 3, sync_style="dynamic_by_explorer")
    world.explore(1)
    settled = world.settle(1)
    world.explore(2)  # meanwhile more has landed
    assert launches(world) == [("sync", 1), ("explore", 3)]
    assert world.train(1) == settled and settled.fresh_rounds == [1]
    assert world.state().landed.rows == ROWS


def test_a_settled_batch_that_was_damaged_is_explored_before_it_trains(tmp_path: Path) -> None:
    world = simulated(tmp_path, 3, train_batch_size=2 * ROWS, sync_style="dynamic_by_explorer")
    world.explore(1)
    world.explore(2)
    world.settle(1)
    withdraw(world.store, 2, Judged)
    assert launches(world) == [("explore", 2)]
    assert "r0001 trains when r0002 is explored again" in waits(world)


def test_sync_offset_bounds_how_far_the_explorer_runs_ahead(tmp_path: Path) -> None:
    world = simulated(tmp_path, 4, sync_style="dynamic_by_explorer", sync_offset=2)
    world.explore(1)
    world.explore(2)
    assert launches(world) == [("sync", 1)]
    assert "r0003 explores after a training: 2 batches have landed without a training" in waits(world)
    world.settle(1)
    assert launches(world, ("sync", 1)) == [("explore", 3)], "what a training has taken is behind it"


def test_the_explorer_waits_rather_than_make_stale_rows(tmp_path: Path) -> None:
    world = simulated(tmp_path, 4, train_batch_size=2, sync_style="dynamic_by_explorer", max_staleness=1)
    world.explore(1)
    assert launches(world) == [("sync", 1)]
    assert "would train 2 policy versions after they were sampled" in waits(world)
    world.settle(1)
    assert launches(world, ("sync", 1)) == [], "the training under way moves on by two versions"
    world.train(1)
    assert launches(world) == [("explore", 2)]


@pytest.mark.parametrize("limit", [{"sync_offset": 1}, {"max_staleness": 1}])
def test_an_explorer_without_a_trainer_explores_all_rounds(tmp_path: Path, limit: dict[str, int]) -> None:
    world = simulated(tmp_path, 3, train_batch_size=2, sync_style="dynamic_by_explorer", **limit)
    config = world.project.config.model_copy(update={"mode": "explore"})
    explorer = Simulated(type(world.project)(world.project.home, config))
    for number in (1, 2, 3):
        assert launches(explorer) == [("explore", number)]
        world.explore(number)
    state = explorer.state()
    assert plan_next(state).finished
    waiting = replace(state, rounds=state.rounds[:1], other_half=True)
    assert plan_next(waiting).waiting[0].startswith("r0002 explores after a training")


def test_stale_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    world = simulated(tmp_path, 3, sync_style="dynamic_by_explorer", sync_interval=3)
    world.explore(1)
    world.explore(2)
    world.settle(1)
    world.explore(3)
    assert world.train(1).steps == 2
    limited = world.project.config.synchronizer.model_copy(update={"max_staleness": 1})
    config = world.project.config.model_copy(update={"synchronizer": limited})
    again = Simulated(type(world.project)(world.project.home, config))
    note = again.train(2)
    assert note.rows == {"fresh": 0, "replay": 0, "filtered": 0, "stale": ROWS} and note.steps == 0
    assert note.last, "they are not waited for"


def test_evaluation_follows_the_batches_that_trained(tmp_path: Path) -> None:
    world = simulated(tmp_path, 5, train_batch_size=2 * ROWS, sync_style="dynamic_by_explorer")
    evaluation = world.project.config.evaluation.model_copy(update={"every": 3})
    config = world.project.config.model_copy(update={"evaluation": evaluation})
    project = type(world.project)(world.project.home, config)
    due = []
    for number, batches in enumerate([(1, 2), (3, 4), (5,)], start=1):
        for batch in batches:
            world.explore(batch)
        world.train(number)
        due.append(is_due(project, number))
    assert due == [False, True, True], "after the third batch, and after the last"


@pytest.mark.parametrize("style", STYLES)
def test_a_training_service_of_its_own_waits_for_rows(tmp_path: Path, style: str) -> None:
    world = simulated(tmp_path, 2, train_batch_size=2 * ROWS, sync_style=style)
    config = world.project.config.model_copy(update={"mode": "train"})
    trainer = Simulated(type(world.project)(world.project.home, config))
    world.explore(1)
    assert not plan_next(trainer.state()).actions
    assert f"r0001 waits: {ROWS} of {2 * ROWS} experiences have landed" in waits(trainer)
    explorer = world.project.config.model_copy(update={"mode": "explore"})
    assert launches(Simulated(type(world.project)(world.project.home, explorer))) == [("explore", 2)]
    world.explore(2)
    assert launches(trainer) == [("sync", 1)]
