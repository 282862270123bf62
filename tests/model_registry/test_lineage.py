"""Traces over a small project: a warm start and three rounds, the second a dead end, in a real store."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rft_platform.cli.commands.trace import (
    print_chain_summary,
    print_checkpoint,
    print_row,
    print_verified,
    whole_checkpoints,
)
from rft_platform.common.errors import DamagedError, StorageError, UserError
from rft_platform.common.files import digest_file, read_json, write_sealed_json
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.sqlite_reader import read_versions
from rft_platform.rounds.project.record import Judged, write
from rft_platform.rounds.reporting.lineage import trace_checkpoint, trace_row
from rft_platform.rounds.reporting.model_card import CardFacts, model_card
from tests.experience.samples import step_row
from tests.support.records import selected

ROWS = 4


@dataclass
class World:
    store: ExperienceStore
    checkpoints: Path

    def folder(self, step: int) -> Path:
        return self.checkpoints / f"global_step_{step}"

    @property
    def warm_start(self) -> Path:
        return self.checkpoints / "warm_start" / "global_step_60"


def rollout(number: int, run: int) -> RolloutRow:
    return step_row(
        f"r{number:04d}-{run}", 0, response_ids=[3], prompt_ids=[1, 2], task_id=f"task{run % 2}", taskset="sums",
        group_id=f"g{run % 2}", round=number, policy_version=8 * (number - 1), engine="transformers 5",
        response={"role": "assistant", "content": "3"},
    )  # fmt: skip


def judge(store: ExperienceStore, number: int, version: str) -> None:
    rows = [
        JudgedRow(row.row_id, row.group_id, row.run_id, 0, float(index), {}, version, index - 1.5,
                  "too_long" if index == 3 else None)
        for index, row in enumerate(store.rollout_rows(number))
    ]  # fmt: skip
    store.write_judged(number, version, rows)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(ExperienceStore(tmp_path / "rounds"), tmp_path / "checkpoints" / "demo")
    base = tmp_path / "base-model"
    base.mkdir()
    publish(made.warm_start, 60, base, 0, {"round": 0, "demonstrations": "d.parquet"})
    for number, parent in ((1, 0), (2, 8), (3, 8)):
        made.store.write_rollouts(number, 0, [rollout(number, run) for run in range(ROWS)])
        judge(made.store, number, "judge-1")
        lineage = selected(made.store, number)
        folder = made.folder(parent) if parent else made.warm_start
        publish(made.folder(8 * number), 8 * number, folder, parent, {**lineage, "dagster_run_id": f"run{number}"})
    return made


def publish(folder: Path, step: int, parent: Path, parent_version: int, lineage: dict[str, Any]) -> None:
    common = {"project": "demo", "name": "first", "config_digest": "c", "code_version": "abc1", "base_model": "base"}
    manifest = {
        "policy_version": step,
        "parent": str(parent),
        "parent_version": parent_version,
        "request": {"output": str(folder.parent)},
        "weights_digest": f"weights{step}",
        "lineage": {**common, **lineage},
    }
    write_sealed_json(folder / "manifest.json", manifest)


def test_the_trace_of_a_checkpoint_ends_at_the_base_model(world: World) -> None:
    trace = trace_checkpoint(world.folder(24), world.store)

    assert [step.result.policy_version for step in trace.trainings] == [24, 8, 60]
    assert (trace.base_model, trace.complete) == ("base", True)
    newest, _, warm_start = trace.trainings
    (file,) = world.store.rollout_files(3)
    assert [(used.path, used.sha256, used.rows) for used in newest.rollouts] == [(str(file), digest_file(file), ROWS)]
    assert (newest.judge_version, newest.data_unchanged, newest.rows_trained) == ("judge-1", True, ROWS - 1)
    assert (newest.config_digest, newest.code_version, newest.dagster_run_id) == ("c", "abc1", "run3")
    assert warm_start.rollouts == ()
    assert warm_start.more["demonstrations"] == "d.parquet"
    plain = json.loads(json.dumps(trace.to_json()))
    assert (plain["rounds"], plain["rows_trained"], plain["dagster_run_ids"]) == ([3, 1, 0], 6, ["run3", "run1"])


def test_changed_data_is_noticed(world: World) -> None:
    rows = world.store.rollout_rows(3)
    rows[0].call.response_ids = [4]
    world.store.write_rollouts(3, 0, rows)
    judge(world.store, 1, "judge-2")
    newest, first, _ = trace_checkpoint(world.folder(24), world.store).trainings
    assert newest.data_unchanged is False
    assert (first.data_unchanged, first.judge_version) == (True, "judge-1"), "its judgement is still there"


def test_a_row_is_traced_to_every_checkpoint_trained_on_it(world: World) -> None:
    judge(world.store, 1, "judge-2")
    trace = trace_row(rollout(1, 2).row_id, world.store, world.checkpoints.parent)

    assert (trace.round, trace.run_id, trace.task_id, trace.policy_version) == (1, "r0001-2", "task0", 0)
    assert [(j.judge_version, j.reward, j.advantage, j.in_force) for j in trace.judgements] == [
        ("judge-1", 2.0, 0.5, False), ("judge-2", 2.0, 0.5, True),
    ]  # fmt: skip
    assert [ref.policy_version for ref in trace.trained] == [8]
    assert [ref.policy_version for ref in trace.descendants] == [16, 24]
    assert json.loads(json.dumps(asdict(trace)))["trained"][0]["checkpoint"] == str(world.folder(8))


@pytest.mark.parametrize(("number", "which"), [(1, "rollouts"), (3, "rollouts"), (1, "judged")])
def test_a_missing_file_of_rows_is_named_in_one_line(world: World, number: int, which: str) -> None:
    file = next((world.store.round_folder(number) / which).glob("*.parquet"))
    file.unlink()
    with pytest.raises(StorageError, match=re.escape(str(file))) as raised:
        trace_row(rollout(1, 2).row_id, world.store, world.checkpoints.parent)
    remedy = "judge round r0001 again" if which == "judged" else "`rft store check`"
    assert remedy in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_dropped_row_trained_nothing(world: World) -> None:
    trace = trace_row(rollout(1, 3).row_id, world.store, world.checkpoints)
    assert trace.judgements[0].dropped_by == "too_long"
    assert (trace.trained, trace.descendants) == ((), ())


def test_the_trace_of_a_row_shows_the_error_of_its_judge(world: World) -> None:
    judged = world.store.judged_rows(1)
    judged[0] = replace(judged[0], dropped_by="judge_error", judge_error="KeyError: 'no such shop' (judge.py:5)")
    world.store.write_judged(1, judged[0].judge_version, judged)
    text = StringIO()
    print_row(trace_row(judged[0].row_id, world.store, world.checkpoints), Console(file=text, width=160))
    assert "dropped by judge_error: KeyError: 'no such shop' (judge.py:5) (in force)" in text.getvalue()


def test_rows_that_are_not_trained_on_are_counted_apart(world: World) -> None:
    """Row 0 is sampled greedily, row 2 is masked, row 3 dropped: one of four rows is trained on."""
    rows = [rollout(4, run) for run in range(ROWS)]
    rows[0].call.temperature = 0.0
    world.store.write_rollouts(4, 0, rows)
    why = {2: "truncated", 3: "too_long"}
    judged = [
        JudgedRow(row.row_id, row.group_id, row.run_id, 0, 1.0, {}, "judge-1", 0.5, why.get(run), masked=run == 2)
        for run, row in enumerate(world.store.rollout_rows(4))
    ]
    world.store.write_judged(4, "judge-1", judged)
    publish(world.folder(32), 32, world.folder(24), 24, selected(world.store, 4))
    manifest = world.folder(32) / "manifest.json"
    write_sealed_json(manifest, {**read_json(manifest), "result": {"metrics": {"rows_other_sampling": 1.0}}})

    trace = trace_checkpoint(world.folder(32), world.store)
    newest = trace.trainings[0]
    assert (newest.rows_trained, newest.rows_masked, newest.rows_dropped) == (1, 1, 1)
    assert newest.rows_left_out == {"sampled with temperature 0, top_p or top_k": 1}
    assert trace.to_json()["rows_trained"] == 1 + 6
    text = StringIO()
    print_checkpoint(trace, Console(file=text, width=300), shown=1)
    not_trained = "not: 1 masked (their rewards count in their groups), 1 dropped, 1 sampled with temperature 0"
    assert f"1 rows trained on; {not_trained}" in text.getvalue()
    trained = [trace_row(row.row_id, world.store, world.checkpoints.parent).trained for row in rows]
    assert [len(found) for found in trained] == [0, 1, 0, 0]
    text = StringIO()
    print_row(trace_row(rows[2].row_id, world.store, world.checkpoints.parent), Console(file=text, width=160))
    assert "masked by truncated" in text.getvalue()


def test_the_last_round_has_no_descendants(world: World) -> None:
    trace = trace_row(rollout(2, 0).row_id, world.store, world.checkpoints)
    assert [ref.policy_version for ref in trace.trained] == [16]
    assert trace.descendants == ()


def test_the_trace_names_model_versions(world: World, connect: Callable[[], ModelRegistry]) -> None:
    registry = connect()
    for step in (8, 24):
        registry.register_checkpoint(world.folder(step), step, {"weights_digest": f"weights{step}"})
    registry.promote(1)

    newest, first, warm_start = trace_checkpoint("models:/demo-model@candidate", world.store, registry).trainings
    assert (newest.result.model_version, newest.result.aliases) == (2, ("candidate",))
    assert (first.result.model_version, first.result.aliases) == (1, ("champion",))
    assert warm_start.result.model_version is None
    row = trace_row(rollout(1, 0).row_id, world.store, world.checkpoints, registry)
    assert [ref.aliases for ref in (*row.trained, *row.descendants)] == [("champion",), (), ("candidate",)]


def test_versions_read_directly_are_those_of_mlflow(world: World, connect: Callable[[], ModelRegistry]) -> None:
    registry = connect()
    assert read_versions(registry.tracking_uri, registry.model_name) == []
    for step in (8, 16, 24):
        registry.register_checkpoint(world.folder(step), step, {"weights_digest": f"weights{step}"})
    registry.promote(2)
    direct = read_versions(registry.tracking_uri, registry.model_name)
    assert direct is not None
    assert [(v.version, v.folder, v.aliases) for v in direct] == [
        (v.version, v.folder, v.aliases) for v in registry.versions()
    ]
    (newest, *_) = trace_checkpoint("models:/demo-model/3", world.store, connect()).trainings
    assert newest.result.model_version == 3
    with pytest.raises(UserError, match="no such version"):
        trace_checkpoint("models:/demo-model@nobody", world.store, registry)


def test_what_is_no_file_of_mlflow_is_left_to_mlflow(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_bytes(b"no database")
    for address in ("http://localhost:1", "postgresql://x", f"sqlite:///{tmp_path / 'none.db'}"):
        assert read_versions(address, "m") is None
    assert read_versions(f"sqlite:///{tmp_path / 'other.db'}", "m") is None


def test_verification_reads_every_byte(world: World) -> None:
    (path,) = world.store.rollout_files(1)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert trace_checkpoint(world.folder(8), world.store).trainings[0].data_unchanged is True  # by ledger and size
    with pytest.raises(StorageError, match="was changed after it was written"):
        trace_checkpoint(world.folder(8), world.store, verify=True)
    path.write_bytes(content[:-1])
    assert trace_checkpoint(world.folder(8), world.store).trainings[0].data_unchanged is False


def test_verification_compares_the_weights_and_reports_matches(world: World) -> None:
    for folder in (world.folder(8), world.folder(24)):
        (folder / "model.safetensors").write_bytes(b"weights")
        files = {"model.safetensors": {"size": 7, "sha256": digest_file(folder / "model.safetensors")}}
        write_sealed_json(folder / "manifest.json", {**read_json(folder / "manifest.json"), "files": files})
    text, found = StringIO(), trace_checkpoint(world.folder(24), world.store, verify=True)
    print_verified(found, whole_checkpoints(found), Console(file=text, width=160))
    assert text.getvalue().splitlines() == [
        "verified: 4 files of rows and 2 of 3 checkpoints match their digests (1 keep only their manifest)"
    ]

    (world.folder(8) / "model.safetensors").write_bytes(b"waights")
    with pytest.raises(DamagedError, match=r"global_step_8: model\.safetensors"):
        whole_checkpoints(found)


def test_the_trace_names_the_judge(world: World) -> None:
    write(world.store, 1, Judged(judge_names={"judge-1": "exact_match"}))
    text = StringIO()
    print_checkpoint(trace_checkpoint(world.folder(8), world.store), Console(file=text, width=160), shown=1)
    assert ["judge", "exact_match", "(judge-1)"] in [line.split() for line in text.getvalue().splitlines()]


def test_algorithm_and_plugins_are_printed(world: World) -> None:
    made_of = {"round": 4, "algorithm": "dapo", "plugins_digest": "1234abcd"}
    publish(world.folder(32), 32, world.folder(24), 24, made_of)
    text = StringIO()
    print_checkpoint(trace_checkpoint(world.folder(32), world.store), Console(file=text, width=160))
    assert ["algorithm", "dapo"] in (lines := [line.split() for line in text.getvalue().splitlines()])
    assert ["plugins", "1234abcd"] in lines


def test_a_chain_is_summed_up_in_a_few_lines(world: World) -> None:
    text = StringIO()
    print_chain_summary(trace_checkpoint(world.folder(24), world.store), Console(file=text, width=160))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("policy version 24")
    assert len(lines) == 6
    assert lines[4].startswith("  before that   1 training on 3 rows after a warm start")
    assert lines[4].endswith("from base model base")
    assert lines[5] == "--all shows every training with its files"


def test_the_summary_of_a_chain_names_earlier_trainings_whose_rows_were_replaced(world: World) -> None:
    world.store.write_rollouts(1, 0, [replace(rollout(1, run), engine="other") for run in range(ROWS)])
    text = StringIO()
    print_chain_summary(trace_checkpoint(world.folder(24), world.store), Console(file=text, width=160))
    assert "1 training on 3 rows (the rows of 1 have CHANGED since then) after a warm start" in text.getvalue()


def test_a_long_chain_is_printed_in_part(world: World) -> None:
    text = StringIO()
    print_checkpoint(trace_checkpoint(world.folder(24), world.store), Console(file=text, width=160), shown=1)
    assert "policy version 24" in text.getvalue() and "policy version 8," not in text.getvalue()
    assert "... and before that 1 training on 3 rows after a warm start with 1 checkpoint" in text.getvalue()
    text = StringIO()
    print_row(trace_row(rollout(1, 0).row_id, world.store, world.checkpoints), Console(file=text, width=160), shown=1)
    assert "1 earlier checkpoint" in text.getvalue() and "version 24" in text.getvalue()


def test_a_moved_project_is_still_traced(world: World, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "demo"
    world.checkpoints.rename(moved)
    trace = trace_checkpoint(moved / "global_step_24", world.store)
    assert [step.result.policy_version for step in trace.trainings] == [24, 8, 60]
    row = trace_row(rollout(1, 0).row_id, world.store, moved)
    assert [ref.policy_version for ref in row.descendants] == [16, 24]


def test_a_lost_ancestor_is_admitted(world: World) -> None:
    (world.warm_start / "manifest.json").unlink()
    trace = trace_checkpoint(world.folder(24), world.store)
    assert ([step.result.policy_version for step in trace.trainings], trace.complete) == ([24, 8], False)
    (world.folder(8) / "manifest.json").unlink()
    assert not trace_checkpoint(world.folder(24), world.store).complete


def test_rounds_of_another_project_are_not_looked_up_here(world: World) -> None:
    continued = world.checkpoints.parent / "other" / "global_step_4"
    publish(continued, 4, world.folder(24), 0, {"project": "other", **selected(world.store, 1)})
    other, *before = trace_checkpoint(continued, world.store).trainings
    assert len(other.rollouts) == 1
    assert [(step.result.policy_version, step.rollouts) for step in before] == [(24, ()), (8, ()), (60, ())]


@pytest.mark.parametrize("name", ["first", "second"], ids=["of the same name", "of another name"])
def test_a_checkpoint_of_another_home_is_not_compared_with_the_rows_of_this_one(
    world: World, tmp_path: Path, name: str
) -> None:
    here = ExperienceStore(tmp_path / "here" / "rounds")
    here.write_rollouts(3, 0, [replace(rollout(3, run), engine="other") for run in range(ROWS)])
    judge(here, 3, "judge-1")
    selected(here, 3)
    trace = trace_checkpoint(world.folder(24), here, project=("demo", name), verify=True)
    assert [(step.data_unchanged, step.rollouts) for step in trace.trainings] == [(None, ())] * 3
    assert trace.trainings[0].code_version == "abc1"
    assert [(step.rows_trained, step.rows_dropped) for step in trace.trainings] == [(3, 1), (3, 1), (None, 0)]
    assert trace.to_json()["rows_trained"] == 6
    text = StringIO()
    print_chain_summary(trace, Console(file=text, width=160))
    assert "before that   1 training on 3 rows after a warm start with 1 checkpoint, from" in text.getvalue()
    facts = CardFacts("title", [], "digest", merged=False)
    card = model_card(trace, None, facts)
    assert "| trainings | 2, after a warm start with 1 checkpoint |" in card and "| rows trained on | 6 |" in card
    publish(world.folder(24), 24, world.folder(8), 8, {"round": 3, "dataset": "d.parquet", "dataset_rows": 9})
    trace = trace_checkpoint(world.folder(24), here, project=("demo", "other"))
    assert (trace.trainings[0].rows_trained, trace.to_json()["rows_trained"]) == (9, 12)
    publish(world.folder(24), 24, world.folder(8), 8, {"round": 3})  # nothing is recorded
    trace = trace_checkpoint(world.folder(24), here, project=("demo", "other"))
    assert (trace.trainings[0].rows_trained, trace.to_json()["rows_trained"]) == (None, None)
    assert "| rows trained on | not recorded for every training |" in model_card(trace, None, facts)


def test_what_is_no_checkpoint_or_row_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a checkpoint of this platform.*global_step"):
        trace_checkpoint(tmp_path / "base-model", world.store)
    with pytest.raises(UserError, match="needs the registry"):
        trace_checkpoint("models:/demo-model@champion", world.store)
    with pytest.raises(UserError, match="in no round"):
        trace_row("f" * 32, world.store, world.checkpoints)
    write_sealed_json(world.folder(16) / "manifest.json", {"policy_version": 16})
    with pytest.raises(StorageError, match="damaged"):
        trace_checkpoint(world.folder(16), world.store)
