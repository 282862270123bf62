"""Which stored rows, groups and outcomes count: those of the right policy, of a sound judgement, used by a training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from simulated import REPEAT, ROWS, Simulated, simulated

from rft_platform.assets.experiences import rollout_batches
from rft_platform.assets.round_lock import release_rounds
from rft_platform.assets.run_failure import CAUSE_TAG, FAULT_TAG
from rft_platform.common.errors import PrerequisiteError, UserError
from rft_platform.common.files import digest_file
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.selections import read_selection, selection_file, write_selection
from rft_platform.inference.interface import PolicyEngine
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import EngineResource, ProjectResource
from rft_platform.rounds.explore import StoredRollouts, snapshot_for
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    TaskBatches,
    set_aside,
    withdraw,
    write,
    write_snapshot,
)
from rft_platform.rounds.round import Round
from rft_platform.rounds.selection import task_selection
from rft_platform.rounds.selection.row_selection import groups_of, pending_rows, used_groups
from rft_platform.rounds.selection.task_selection import TaskSelection
from rft_platform.tasks.task import Task
from tests.experience.samples import judged, rollouts

TASKS = [Task(f"task-{number}", "set", "", None, {}) for number in range(2)]


def store_round(world: Simulated, number: int, rows: list[RolloutRow]) -> None:
    """Store a round of two groups of two runs as explored and judged."""
    world.store.write_rollouts(number, 0, rows)
    world.store.write_judged(number, "v", judged(rows, "v"))
    task_batches = TaskBatches(first_batch=number - 1, batches=1)
    write(world.store, number, Explored(rows=len(rows), policy_version=4, task_selection=task_batches))
    write(world.store, number, Judged(sound=True))


def test_rows_of_an_unsound_judgement_are_not_pending(tmp_path: Path) -> None:
    world = simulated(tmp_path, sync_style="dynamic_by_explorer")
    for number in (1, 2):
        world.explore(number)
    assert pending_rows(world.project, 0).rounds == 2
    write(world.store, 2, Judged(sound=False))
    assert pending_rows(world.project, 0).rounds == 1
    write(world.store, 1, Judged(sound=False))
    assert pending_rows(world.project, 0).rounds == 0


def test_a_group_that_was_too_old_to_train_was_not_used(tmp_path: Path) -> None:
    world = simulated(tmp_path, 3, sync_style="dynamic_by_explorer", sync_interval=3, replay={"enable": True})
    world.explore(1)
    world.settle(1)
    world.explore(2)
    assert world.train(1).steps == 1
    limited = world.project.config.synchronizer.model_copy(update={"max_staleness": 0})
    config = world.project.config.model_copy(update={"synchronizer": limited})
    assert Simulated(type(world.project)(world.project.home, config)).train(2).rows["stale"] > 0
    assert {group.round for group in used_groups(world.project, 3)} == {1}


def test_a_group_has_the_rows_of_the_policy_that_trains(tmp_path: Path) -> None:
    world, rows = simulated(tmp_path), rollouts()
    rows[1].call.policy = "rival"
    store_round(world, 1, rows)
    for version, name in ((9, "rival"), (4, DEFAULT_POLICY)):
        write_snapshot(world.store, 1, Policy("f", version, "d", 0, name=name))
    (own,) = groups_of(world.store, 1, "rival")
    assert (own.kept, own.policy_version) == ((rows[1].row_id,), 9)
    others = groups_of(world.store, 1, DEFAULT_POLICY)
    assert [group.kept for group in others] == [(rows[0].row_id,), (rows[2].row_id, rows[3].row_id)]


def test_a_changed_selection_is_made_again_before_its_training(tmp_path: Path) -> None:
    world = simulated(tmp_path)
    world.explore(1)
    note, rows = world.settle(1), world.selected(1)
    write_selection(world.store, 1, rows[1:])
    again = world.settle(1)
    assert again.sha256 == digest_file(selection_file(world.store, 1)) and again.rows == note.rows
    assert read_selection(world.store, 1).to_pylist() == rows
    selection_file(world.store, 1).unlink()
    assert world.settle(1).rows == note.rows and world.selected(1) == rows


def test_rows_are_selected_again_after_one_of_their_rounds_was_explored_again(tmp_path: Path) -> None:
    world = simulated(tmp_path, sync_style="dynamic_by_explorer")
    store_round(world, 1, rollouts())
    selection = world.settle(1)
    assert world.settle(1) == selection
    again = [replace(row, run_id=f"again-{row.run_id}", row_id=f"again-{row.row_id}") for row in rollouts()]
    store_round(world, 1, again)
    assert world.settle(1).rows == selection.rows
    assert {row["row_id"] for row in world.selected(1)} == {row.row_id for row in again}


@pytest.mark.parametrize("style", ["fixed", "dynamic_by_trainer", "dynamic_by_explorer"])
def test_a_training_that_is_launched_before_rows_have_landed_selects_none(tmp_path: Path, style: str) -> None:
    world = simulated(tmp_path, sync_style=style)
    with pytest.raises(PrerequisiteError, match=r"r0001 has no .*explore_job"):
        world.settle(1)
    store_round(world, 1, rollouts())
    assert world.settle(1).rows["fresh"] == len(rollouts())


class Connected(Exception):
    """The engine was asked for."""


def connect() -> PolicyEngine:
    raise Connected


def contents(world: Simulated) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in world.store.root.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("style", "ended"), [("fixed", True), ("fixed", False), ("dynamic_by_trainer", True), ("dynamic_by_trainer", False)]
)
def test_a_round_whose_rows_a_training_reads_is_not_explored_again(tmp_path: Path, style: str, ended: bool) -> None:
    interval = 2 if style == "dynamic_by_trainer" else 1
    world = simulated(tmp_path, sync_style=style, sync_interval=interval)
    for number in range(1, interval + 1):
        snapshot_for(world.project, number)
        store_round(world, number, rollouts(round=number))
    with pytest.raises(Connected):
        Round(world.project, interval).explore(connect)
    (world.train if ended else world.settle)(1)
    before = contents(world)
    with pytest.raises(UserError, match=f"^r000{interval} cannot be explored again, .* training of r0001 reads"):
        Round(world.project, interval).explore(connect)
    assert contents(world) == before


def test_the_asset_of_a_trained_round_starts_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = simulated(tmp_path)
    snapshot_for(world.project, 1)
    store_round(world, 1, rollouts())
    world.train(1)
    monkeypatch.setattr(EngineResource, "connect", lambda *_: connect())
    resource = ProjectResource(home=str(world.project.home.root))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
        done = dg.materialize(
            [rollout_batches.of(PLAIN_NAMES)], instance=instance, partition_key="r0001", raise_on_error=False,
            resources={"project": resource, "engine": EngineResource(project=resource), "tables": dg.mem_io_manager},
        )  # fmt: skip
        run = instance.get_run_by_id(done.run_id)
    release_rounds(done.run_id)
    assert run is not None and run.tags[FAULT_TAG] == "user_input"
    assert "r0001 cannot be explored again" in run.tags[CAUSE_TAG]


@pytest.mark.parametrize("ended", [True, False])
def test_a_round_with_an_unsound_judgement_is_explored_again_unless_it_has_trained(tmp_path: Path, ended: bool) -> None:
    world = simulated(tmp_path)
    snapshot_for(world.project, 1)
    store_round(world, 1, rollouts())
    (world.train if ended else world.settle)(1)
    write(world.store, 1, Judged(sound=False))
    with pytest.raises(UserError if ended else Connected):
        Round(world.project, 1).explore(connect)


def test_a_trained_round_is_explored_again_if_its_rows_were_damaged_or_its_judgement_is_missing(tmp_path: Path) -> None:
    world = simulated(tmp_path)
    snapshot_for(world.project, 1)
    store_round(world, 1, rollouts())
    world.train(1)
    withdraw(world.store, 1, Judged)
    with pytest.raises(Connected):  # it continues with the stored rows
        Round(world.project, 1).explore(connect)
    write(world.store, 1, Judged(sound=True))
    (file,) = world.store.rollout_files(1)
    set_aside(world.store, 1, DamagedFile(file, "was changed"))
    with pytest.raises(Connected):
        Round(world.project, 1).explore(connect)


@pytest.mark.parametrize(
    ("version", "tasks", "continues"), [(4, TASKS, True), (5, TASKS, False), (4, TASKS[::-1], False)]
)
def test_stored_rollouts_of_the_same_weights_and_tasks_continue(
    tmp_path: Path, version: int, tasks: list[Task], continues: bool
) -> None:
    world, rows = simulated(tmp_path), rollouts()
    world.store.write_rollouts(1, 0, rows)
    stored = StoredRollouts(world.project, 1, {DEFAULT_POLICY: Policy("f", version, "d", 0)})
    batch = stored.batch(0, tasks)
    assert [row.row_id for row in batch.rows] == [row.row_id for row in rows] if continues else batch is None


def test_tasks_are_selected_by_outcomes_up_to_the_round_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = simulated(tmp_path, sync_offset=1)
    task_ids = [task.task_id for task in world.project.tasks.tasks]
    for number in (1, 2):
        rows = rollouts(round=number)
        for row in rows:
            row.task_id = task_ids[int(row.task_id[-1])]
        store_round(world, number, rows)
    known: list[list[int]] = []

    def spy(name: str, tasks: Any, moment: Any, history: Any, args: Any) -> Any:
        known.append(sorted(set(history.outcomes(moment.step, 1.0).round_N.tolist())))
        return select(name, tasks, moment, history, args)

    select = task_selection.select
    monkeypatch.setattr(task_selection, "select", spy)
    for policy_round in (0, 1, 2):
        TaskSelection(world.project, 3, policy_round).next()
    assert known == [[], [1], [1, 2]]


def test_the_style_fixed_takes_all_rows_of_the_round(tmp_path: Path) -> None:
    world = simulated(tmp_path)
    world.explore(1, drops=lambda row: row < REPEAT)
    settled = world.settle(1)
    assert settled.rows == {"fresh": ROWS - REPEAT, "replay": 0, "filtered": REPEAT, "stale": 0}
    assert (settled.rounds, settled.fresh_rounds, settled.left, settled.steps) == ([1], [1], {}, 1)
    assert [row["row_id"] for row in world.selected(1) if row["use"] == "fresh"] == ["1-2", "1-3"]
    assert world.settle(1) == settled, "a repeated training takes the same"


def test_a_round_that_is_judged_again_before_its_training_is_selected_again(tmp_path: Path) -> None:
    world = simulated(tmp_path)
    world.explore(1, drops=lambda row: row < REPEAT)
    first = world.settle(1)
    world.explore(1)
    second = world.train(1)
    assert (first.rows["fresh"], second.rows["fresh"]) == (ROWS - REPEAT, ROWS)
    world.explore(1, drops=lambda row: row < REPEAT)
    assert world.settle(1) == second, "it has trained"
