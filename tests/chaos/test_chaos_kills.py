"""Kills over every process of the platform; and that the invariants would tell if something were wrong.

As many as the suite has time for: each target at least once. ``python -m chaos --kills 200`` does hundreds.
"""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest

from chaos.campaign import run_chaos
from chaos.driver_mode import environment
from chaos.invariants import machine as machine
from chaos.invariants import reference as references
from chaos.invariants import services as services
from chaos.invariants import store as stored
from chaos.invariants.context import Context, Invariant
from chaos.records import Outcome, summary
from chaos.schedule import TARGETS
from chaos.scratch import Scratch
from rft_platform.cluster.local.leases import Lease, write_lease
from rft_platform.common.digests import MANIFEST
from rft_platform.common.files import read_sealed_json, temporary_path, write_sealed_json
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published, read, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: A seed whose kills strike every target, planned for every phase and by every signal; how late they come is chance.
KILLS, SEED = 9, 10252
EVERY = sorted({*TARGETS["driver"], *TARGETS["daemon"]})


@pytest.fixture(scope="module")
def outcomes(scratch: Scratch) -> list[Outcome]:
    """The kills, done."""
    return run_chaos(scratch, KILLS, SEED, EVERY, print, side_by_side=True)


@pytest.fixture
def reference(outcomes, scratch: Scratch, tmp_path: Path) -> Context:
    """A copy of the undisturbed project with its checkpoints, to be broken."""
    home = Home(tmp_path / "home")
    shutil.copytree(scratch.home("reference").root, home.root)
    project = Project.open(home)
    return Context(project, project.rounds_budget)


def broken(invariant: Invariant, context: Context) -> str:
    return "; ".join(found.message for found in invariant(context))


def test_projects_survive_kills_of_every_process(outcomes):
    assert [str(violation) for outcome in outcomes for violation in outcome.violations] == []
    told = summary(outcomes)
    assert told["kills"] + told["missed"] == KILLS
    assert told["missed"] <= 1, "nearly every victim was there to be killed"
    assert set(told["by_target"]) == set(EVERY)
    assert len(told["by_phase"]) >= 3
    assert len(told["by_signal"]) >= 2
    for outcome in outcomes:
        assert outcome.facts["rows"] == 16 * outcome.rounds
        assert outcome.facts["largest_weight_difference"] == 0.0
        assert outcome.facts["rounds_with_equal_digest"] == outcome.rounds
        assert outcome.facts["asset_checks_compared"] >= outcome.rounds
        assert outcome.facts["failed_runs"] >= 1, "kills that nobody noticed prove nothing"


def test_the_undisturbed_project_breaks_no_invariant(reference):
    checks = [stored.row_ids_are_unique, stored.rows_are_complete, stored.rows_and_judgements_match]
    checks += [stored.checkpoints_are_whole, services.no_run_is_open, services.every_failure_has_a_cause]
    assert [broken(check, reference) for check in checks] == [""] * len(checks)


def test_lost_and_duplicate_rows_are_reported(reference):
    first, second = (reference.project.store.rollout_files(number)[0] for number in (1, 2))
    table = pq.read_table(first)
    pq.write_table(table.slice(1), first)
    assert "15 rows, expected 16" in broken(stored.rows_are_complete, reference)
    assert "r0001" in broken(stored.rows_and_judgements_match, reference)
    assert "damaged" in broken(stored.files_are_as_written, reference)
    pq.write_table(table, second)
    assert "more than once" in broken(stored.row_ids_are_unique, reference)
    assert "r0002 has rows of policy versions [0]" in broken(stored.rows_are_of_one_version, reference)


def test_a_damaged_checkpoint_and_different_weights_are_reported(reference, scratch):
    policy = published(reference.project.store, 1)
    assert policy is not None
    with changed(Path(policy.folder) / "model.safetensors"):
        assert "is damaged" in broken(stored.checkpoints_are_whole, reference)
        assert broken(services.model_versions_point_at_their_weights, reference) == ""  # the manifest still agrees
    other = Context(reference.project, 1, reference=Project.open(scratch.home("reference")))
    note = read(reference.project.store, 2).published()
    write(reference.project.store, 1, replace(note, round=1))
    assert "weights differ" in broken(stored.weights_equal_the_undisturbed_run, other)


def test_a_changed_row_note_metric_or_checkpoint_is_reported(reference, scratch):
    compared = Context(reference.project, reference.rounds, reference=Project.open(scratch.home("reference")))
    checks = [references.rows_equal_the_undisturbed_run, references.notes_equal_the_undisturbed_run]
    checks += [references.metrics_equal_the_undisturbed_run, references.checkpoints_equal_the_undisturbed_run]
    checks += [references.model_versions_equal_the_undisturbed_run, references.checks_equal_the_undisturbed_run]
    assert [broken(check, compared) for check in checks] == [""] * len(checks)
    file = reference.project.store.rollout_files(1)[0]
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index("response"), "response", [["x"] * 16]), file)
    note = read(reference.project.store, 2).trained()
    write(reference.project.store, 2, replace(note, metrics={**note.metrics, "zero_advantage_share": 2.0}))
    with closing(sqlite3.connect(reference.home.mlflow / "mlflow.db")) as database:
        database.execute("UPDATE metrics SET value = 2 WHERE key = 'round/rows_with_signal' AND step = 1")
        database.execute("DELETE FROM metrics WHERE key = 'train/loss' AND step = 1")
        database.commit()
    policy = published(reference.project.store, 2)
    manifest = Path(policy.folder) / MANIFEST
    written = read_sealed_json(manifest)
    written["files"]["trainer_state/random.safetensors"]["sha256"] = "0"
    written.pop("$sha256", None)
    write_sealed_json(manifest, written)
    said = [broken(check, compared) for check in checks]
    assert "r0001: rollouts differ" in said[0]
    assert "r0002: note train-policy differs from the undisturbed run in /metrics/zero_advantage_share" in said[1]
    assert (
        "2 metrics differ from the undisturbed run, round/rows_with_signal at step 1, train/loss at step 1" in said[2]
    )
    assert "r0002: trainer_state/random.safetensors differ" in said[3]


def test_an_open_run_is_reported(reference):
    with open_instance(reference.home) as instance:
        instance.add_run(dg.DagsterRun(job_name="explore_job", status=dg.DagsterRunStatus.STARTED))
    assert "of explore_job is still STARTED" in broken(services.no_run_is_open, reference)


def test_a_stale_lease_an_orphan_and_a_partial_file_are_reported(tmp_path):
    home = Home(tmp_path / "home")
    write_lease(home.leases / "engine.json", Lease("engine", 1, 1.0, "127.0.0.1", 1, "t", "", 0.0, {}))
    temporary_path(home.root / "rounds").mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(600)", "rft_platform.training.service.worker"]
    with subprocess.Popen(command, env=environment(home.root)) as orphan:
        open_project = " ".join(found.message for found in machine.servers_hold_their_leases(home))
        stopped = [found.message for found in machine.no_process_is_left(home)]
        orphan.kill()
    assert "does not run any more" in open_project
    assert f"trainer (pid {orphan.pid}" in open_project
    assert "runs without a lease" in open_project
    assert len(stopped) == 1
    assert str(orphan.pid) in stopped[0]
    assert "left behind" in " ".join(found.message for found in machine.nothing_is_half_written(home))
    assert "still there" in " ".join(found.message for found in machine.no_lease_is_left(home))


@contextmanager
def changed(file: Path) -> Iterator[None]:
    """One byte of the file is another one while the block runs."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        yield
    finally:
        file.write_bytes(whole)
