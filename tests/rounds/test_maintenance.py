"""Upkeep of a project: only closed rounds, never the champion's unless told, and the lineage still explains."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import dagster as dg
import pytest
import yaml
from typer.testing import CliRunner

from rft_platform.assets.run_failure import CAUSE_TAG, FAULT_TAG
from rft_platform.cli.main import app
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.jobs.maintenance import maintenance_jobs
from rft_platform.model_registry.models import RegisteredModel
from rft_platform.object_store.mirror import HomeMirror, open_mirror
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource, RegistryResource
from rft_platform.rounds.maintenance.store_maintenance import champion_rounds, closed_rounds, compact, retain
from rft_platform.rounds.maintenance.verification import verify
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write
from rft_platform.rounds.reporting.lineage import trace_checkpoint, trace_row
from tests.experience.samples import step_row
from tests.support.records import selected

ROUNDS, BATCHES = 4, 2  # the last round is explored, not trained; round 3 descends from 1, and 2 is a dead end
PARENT = {1: 0, 2: 1, 3: 1}
COMPACT_JOB, RETENTION_JOB = maintenance_jobs(PLAIN_NAMES)


class Champion:
    """The one thing that retention asks of a registry."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def champion(self) -> RegisteredModel | None:
        """The promoted version."""
        return None if self.folder is None else RegisteredModel("m", 1, self.folder)


def rollout(number: int, batch: int, run: int) -> RolloutRow:
    return step_row(
        f"r{number:04d}-{batch}-{run}", 0, response_ids=[2], task_id="task", taskset="sums", group_id=f"g{batch}",
        round=number, policy_version=8 * (number - 1), response={"role": "assistant", "content": "2"},
    )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    home = Home(tmp_path / "home")
    monkeypatch.setenv("RFT_HOME", str(home.root))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_text(home.config_file, yaml.safe_dump({"model": {"model_path": "base"}, "project": "p", "name": "n"}))
    opened = Project.open(home)
    store = opened.store
    for number in range(1, ROUNDS + 1):
        for batch in range(BATCHES):
            store.write_rollouts(number, batch, [rollout(number, batch, run) for run in range(3)])
        rows = store.rollout_rows(number)
        store.write_judged(number, "v", [JudgedRow(r.row_id, r.group_id, r.run_id, 0, 1.0, {}, "v", 0.5) for r in rows])
        if number < ROUNDS:
            close(opened, number)
    return opened


def close(project: Project, number: int) -> None:
    parent = project.checkpoints / f"global_step_{8 * PARENT[number]}" if PARENT[number] else Path("/base")
    lineage = {"project": "p", "name": "n", "base_model": "base", **selected(project.store, number, "v")}
    manifest = {
        "policy_version": 8 * number, "parent": str(parent), "parent_version": 8 * PARENT[number],
        "files": {}, "weights_digest": "w", "lineage": lineage, "request": {"output": str(project.checkpoints)},
    }  # fmt: skip
    folder = checkpoint(project, number)
    write_sealed_json(folder / "manifest.json", manifest)
    publish(project.store, Policy(str(folder), 8 * number, "w", round=number))
    write(project.store, number, RoundEvaluation())


def checkpoint(project: Project, number: int) -> Path:
    return project.checkpoints / f"global_step_{8 * number}"


def test_closed_rounds_are_compacted_but_for_the_last(project: Project) -> None:
    assert closed_rounds(project) == [1, 2, 3]
    planned = compact(project, keep_last=1, dry_run=True)
    assert [rewrite.round for rewrite in planned.rewrites] == [1, 2]
    done = compact(project, keep_last=1, grace_s=0)
    assert [(r.round, r.rows) for r in done.rewrites] == [(1, 6), (2, 6)] and done.freed_bytes > 0
    assert [len(project.store.rollout_files(n)) for n in range(1, 5)] == [1, 1, 2, 2]
    assert compact(project, keep_last=1).rewrites == []
    trace = trace_checkpoint(checkpoint(project, 3), project.store, verify=True)
    assert [step.data_unchanged for step in trace.trainings] == [True, True]


def test_a_damaged_round_is_reported_and_does_not_block_other_rounds(project: Project) -> None:
    path = project.store.rollout_files(1)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = compact(project, keep_last=0)
    assert [rewrite.round for rewrite in done.rewrites] == [2, 3]
    assert len(done.problems) == 1 and path.name in done.problems[0]


def test_retention_keeps_the_champions_rounds(project: Project) -> None:
    champion = Champion(checkpoint(project, 3))
    assert champion_rounds(project, champion) == {1, 3}  # type: ignore[arg-type]
    done = retain(project, champion, keep_last=0, grace_s=0)  # type: ignore[arg-type]
    assert ([retired.round for retired in done.retirements], done.protected) == ([2], [1, 3])
    assert done.freed_bytes > 0
    everything = retain(project, champion, keep_last=1, champion_too=True)  # type: ignore[arg-type]
    assert [retired.round for retired in everything.retirements] == [1]
    assert project.store.count_rollouts(3) == project.store.count_rollouts(4) == 6


def test_retention_by_age_and_its_limits(project: Project) -> None:
    nobody = Champion(None)
    with pytest.raises(UserError, match="needs a limit"):
        retain(project, nobody)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected 0 or more"):
        retain(project, nobody, keep_last=-1)  # type: ignore[arg-type]
    assert retain(project, nobody, older_than_days=1).retirements == []  # type: ignore[arg-type]
    planned = retain(project, nobody, keep_last=2, older_than_days=0, dry_run=True)  # type: ignore[arg-type]
    assert [retired.round for retired in planned.retirements] == [1] and project.store.count_rollouts(1) == 6


def test_the_lineage_names_retired_rows(project: Project, tmp_path: Path) -> None:
    row = rollout(1, 1, 2).row_id
    before = trace_row(row, project.store, project.checkpoints)
    retain(project, Champion(None), keep_last=2, archive=tmp_path / "archive", grace_s=0)  # type: ignore[arg-type]
    found = trace_row(row, project.store, project.checkpoints)
    assert (found.round, found.run_id, found.task_id) == (1, "r0001-1-2", None)
    assert (found.judgements, found.trained) == (before.judgements, before.trained)
    assert "6 rollout rows were retired on" in found.retired and str(tmp_path / "archive") in found.retired
    (training,) = trace_checkpoint(checkpoint(project, 1), project.store).trainings
    assert (training.data_unchanged, training.rollouts, training.rows_trained) == (True, (), 6)
    assert training.retired == found.retired


def damage_archive(project: Project, folder: Path) -> Path:
    retain(project, Champion(None), keep_last=2, archive=folder)  # type: ignore[arg-type]
    path = folder / "r0001" / "rollouts" / "batch-0001.parquet"
    path.write_bytes(b"")
    return path


def damage_rollouts(project: Project, folder: Path) -> Path:
    path = project.store.rollout_files(2)[0]
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    return path


def damage_note(project: Project, folder: Path) -> Path:
    path = project.store.round_folder(3) / "evaluation.json"
    path.write_text('{"results": [')
    return path


@pytest.mark.parametrize("harm", [damage_archive, damage_rollouts, damage_note])
def test_verification_names_every_kind_of_damage(
    project: Project, tmp_path: Path, harm: Callable[[Project, Path], Path]
) -> None:
    whole = verify(project)
    assert (whole.rounds, whole.files, whole.damaged) == (4, 12, [])
    path = harm(project, tmp_path / "archive")
    assert [file.path for file in verify(project).damaged] == [path]


def test_rows_that_were_replaced_after_their_training_are_named(project: Project) -> None:
    assert verify(project).changed == []
    compact(project, keep_last=0, grace_s=0)
    retain(project, Champion(None), keep_last=2)  # type: ignore[arg-type]
    assert verify(project).changed == [], "compaction and retirement do not change what a training read"
    (project.store.round_folder(3) / "judged" / "v.parquet").unlink()
    rows = project.store.rollout_rows(3)
    project.store.write_judged(3, "v", [JudgedRow(r.row_id, r.group_id, r.run_id, 0, 0.0, {}, "v", 0.0) for r in rows])
    (said,) = verify(project).changed
    assert said.startswith("the training of r0003 read rows or a judgement of r0003 that were replaced")
    checked = CliRunner().invoke(app, ["store", "check"])
    assert checked.exit_code == 0 and f"changed: {said}" in checked.stdout and "matches" not in checked.stdout


def test_the_commands(project: Project) -> None:
    run = CliRunner().invoke
    planned = run(app, ["store", "compact", "--keep-last", "0", "--dry-run"])
    assert planned.stdout == "6 files would be rewritten as 3, 18 rows\n" and planned.exit_code == 0
    assert "6 files rewritten as 3" in run(app, ["store", "compact", "--keep-last", "0", "--grace-s", "0"]).stdout
    checked = run(app, ["store", "check"])
    assert (checked.exit_code, checked.stdout[:18]) == (0, "4 rounds, 9 files,")
    refused = run(app, ["store", "retain"])
    assert refused.exit_code == 2 and "needs a limit" in refused.stderr
    path = damage_rollouts(project, Path())
    found = run(app, ["store", "check", "--set-aside"])
    assert found.exit_code == 1 and str(path) in found.stdout and not path.exists()
    assert run(app, ["store", "check"]).exit_code == 0


def tags_of(instance: dg.DagsterInstance, done: dg.ExecuteInProcessResult) -> dict[str, str]:
    """The tags of a run that has ended."""
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    return dict(run.tags)


def test_the_jobs(project: Project) -> None:
    resources = {"project": ProjectResource(home=str(project.home.root))}
    configured = {"ops": {"compact_store": {"config": {"keep_last": 1, "grace_s": 0.0}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        done = COMPACT_JOB.execute_in_process(run_config=configured, resources=resources, instance=instance)
        assert done.success and len(project.store.rollout_files(2)) == 1 and len(project.store.rollout_files(3)) == 2
        damage_rollouts(project, Path())
        (project.store.round_folder(2) / "files.json").write_text("{")
        failed = COMPACT_JOB.execute_in_process(
            run_config={"ops": {"compact_store": {"config": {"keep_last": 0}}}},
            resources=resources, instance=instance, raise_on_error=False,
        )  # fmt: skip
        assert not failed.success and len(project.store.rollout_files(3)) == 1
        tags = tags_of(instance, failed)
    assert tags[FAULT_TAG] == "storage" and "r0002/files.json: is not a ledger" in tags[CAUSE_TAG]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")  # Dagster's own use of it
def test_the_retention_job_is_a_dry_run_by_default(project: Project) -> None:
    resources = {"project": ProjectResource(home=str(project.home.root)), "registry": RegistryResource()}
    with dg.DagsterInstance.ephemeral() as instance:
        for dry_run, rows in ((None, 6), (False, 0)):
            given = {"keep_last": 2} | ({} if dry_run is None else {"dry_run": dry_run})
            done = RETENTION_JOB.execute_in_process(
                run_config={"ops": {"retire_rounds": {"config": given}}}, resources=resources, instance=instance
            )
            assert done.success and project.store.count_rollouts(1) == rows
        refused = RETENTION_JOB.execute_in_process(resources=resources, instance=instance, raise_on_error=False)
        tags = tags_of(instance, refused)
    assert not refused.success and tags[FAULT_TAG] == "user_input"
    assert "set keep_last (number of newest rounds to keep), older_than_days (an age)" in tags[CAUSE_TAG]


def test_maintenance_removes_objects_of_interrupted_uploads(project: Project, tmp_path: Path) -> None:
    mirror = open_mirror(project.home.root, f"file://{tmp_path}/bucket/project")
    mirror.take_over()
    mirror.commit()
    left = tmp_path / "bucket" / "project" / "files" / "rounds" / "r0009" / "0123-batch-0000.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"rows" * 100)
    os.utime(left, (0, 0))
    runner = CliRunner()
    dry = runner.invoke(app, ["store", "compact", "--dry-run"])
    assert "1 objects of interrupted uploads would be removed" in dry.output and left.exists()
    compacted = runner.invoke(app, ["store", "compact"])
    assert compacted.exit_code == 0 and "1 objects of interrupted uploads removed" in compacted.output
    assert not left.exists() and compact(project).orphans == 0
    open_mirror(second := tmp_path / "second", mirror.url).take_over()  # has the project now
    assert "another home has continued" in "".join(compact(project).problems)
    assert compact(Project.open(Home(second))).problems == []


def test_a_home_that_took_over_traces_without_the_rows(project: Project, tmp_path: Path) -> None:
    mirror, second = open_mirror(project.home.root, f"file://{tmp_path}/bucket/project"), tmp_path / "second"
    mirror.take_over()
    mirror.commit()
    open_mirror(second, mirror.url).take_over()
    taken, row = Project.open(Home(second)), project.store.rollout_rows(1)[0].row_id
    ours, theirs = (trace_row(row, each.store, each.checkpoints) for each in (project, taken))
    assert [one.policy_version for one in theirs.trained] == [one.policy_version for one in ours.trained] == [8]
    assert [one.policy_version for one in theirs.descendants] == [one.policy_version for one in ours.descendants]
    assert theirs.judgements == ours.judgements and theirs.run_id == ours.run_id
    chains = [trace_checkpoint(each.checkpoints / "global_step_24", each.store) for each in (project, taken)]
    assert [one.data_unchanged for chain in chains for one in chain.trainings] == [True] * 4
    rows = [path for number in taken.store.rounds() for path in taken.store.rollout_files(number)]
    assert rows and not any(path.exists() for path in rows)
    assert [path.parent.name for path in second.rglob("row_selection-*.parquet")] == ["r0001"]


def taken_over(project: Project, tmp_path: Path) -> tuple[Project, HomeMirror]:
    """The project in a second home, which has its notes and none of its rows."""
    mirror, second = open_mirror(project.home.root, f"file://{tmp_path}/bucket/project"), tmp_path / "second"
    mirror.take_over()
    with mirror.driving():
        pass
    mirror = open_mirror(second, mirror.url)
    mirror.take_over()
    return Project.open(Home(second)), mirror


def stored_rows(tmp_path: Path) -> list[str]:
    """The rounds of the objects with rows."""
    return sorted(path.parts[-3] for path in (tmp_path / "bucket").rglob("*batch-*.parquet"))


def test_rounds_that_only_the_object_store_has_are_compacted_and_archived(project: Project, tmp_path: Path) -> None:
    rows = project.store.rollout_rows(1)
    taken, _ = taken_over(project, tmp_path)
    done = compact(taken, keep_last=2, grace_s=0)
    assert [rewrite.round for rewrite in done.rewrites] == [1] and done.problems == []
    assert taken.store.rollout_rows(1) == rows
    archived = retain(taken, Champion(None), keep_last=1, archive=tmp_path / "archive", grace_s=0)  # type: ignore[arg-type]
    assert [one.round for one in archived.retirements] == [1, 2] and archived.problems == []
    assert len(list((tmp_path / "archive").rglob("*.parquet"))) == 3


def test_rounds_that_only_the_object_store_has_are_deleted_there(project: Project, tmp_path: Path) -> None:
    taken, mirror = taken_over(project, tmp_path)
    assert stored_rows(tmp_path) == ["r0001", "r0001", "r0002", "r0002", "r0003", "r0003", "r0004", "r0004"]
    done = retain(taken, Champion(None), keep_last=1, grace_s=0)  # type: ignore[arg-type]
    assert done.freed_bytes > 0 and done.problems == []
    assert {path.parent.parent.name for path in mirror.stored_below(taken.store.root) if "rollouts" in path.parts} == {
        "r0003", "r0004",
    }  # fmt: skip
    mirror.commit(grace_s=0.0)
    assert stored_rows(tmp_path) == ["r0003", "r0003", "r0004", "r0004"]


def test_a_sweep_records_the_removals_of_a_round_at_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, _ = taken_over(project, tmp_path)
    removals, record = list[int](), HomeMirror.removing

    def counted(self: HomeMirror, paths: list[Path]) -> AbstractContextManager[None]:
        removals.append(len(paths))
        return record(self, paths)

    monkeypatch.setattr(HomeMirror, "removing", counted)
    retain(taken, Champion(None), keep_last=1, grace_s=0)  # type: ignore[arg-type]
    assert removals == [2, 2]


def test_missing_rows_are_reported_and_do_not_block_other_rounds(project: Project) -> None:
    project.store.rollout_files(1)[0].unlink()
    done = compact(project, keep_last=1)
    assert [rewrite.round for rewrite in done.rewrites] == [2] and "is missing" in done.problems[0]
