"""`rft run` with `sync_offset: 1`: exploration and training run side by side, to the same rows and weights."""

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from interface import wait_for

from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.instance import open_instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 4
UNFINISHED = {dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.CANCELING}
ONE_AT_A_TIME = """
import sys
from rft_platform.definitions import defs
from rft_platform.run.start import write_config
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run.driver import drive
from rft_platform.rounds.project.project import Project
home = Home.from_environment()
write_config(home, load_config(sys.argv[1]))
assert drive(Project.open(home), defs, max_launches=100).finished
"""
CHANGES: dict[str, Any] = {"synchronizer": {"sync_offset": 1}, "explorer": {"eval_on_startup": False}}


def project_of(make_project, name: str):
    project = make_project(name, **CHANGES)
    text = project.config.read_text()
    project.config.write_text(text.replace("total_steps: 2", f"total_steps: {ROUNDS}"))
    return project


@pytest.fixture(scope="module")
def serial(make_project):
    """The project as it ends where one launch runs at a time."""
    project = project_of(make_project, "serial")
    command = [sys.executable, "-c", ONE_AT_A_TIME, str(project.config)]
    done = subprocess.run(command, env=project.environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return project


def rows(project) -> list[dict[str, Any]]:
    """Identity and tokens of all rows."""
    store = ExperienceStore(Home(project.home).rounds)
    names = ("row_id", "policy_version", "prompt_ids", "response_ids", "rollout_logprobs")
    found = [row for number in range(1, ROUNDS + 1) for row in store.read_rollouts(number, list(names)).to_pylist()]
    return sorted(found, key=lambda row: row["row_id"])


def ends_as(project, serial) -> None:
    """Assert that both projects have the same rows and weights."""
    for number in range(1, ROUNDS + 1):
        assert project.note(number, "policy")["weights_digest"] == serial.note(number, "policy")["weights_digest"]
    assert rows(project) == rows(serial)


def explored_with(project) -> list[int]:
    return [project.note(number, "snapshot")["policy_version"] for number in range(1, ROUNDS + 1)]


def runs(project) -> list[dg.RunRecord]:
    with open_instance(Home(project.home)) as instance:
        return list(instance.get_run_records())


def test_exploration_runs_beside_training_to_the_same_rows_and_weights(make_project, serial) -> None:
    project = project_of(make_project, "overlapped")
    done = project.rft("run", "--config", str(project.config))
    assert "waits: the pool" not in done.stdout + done.stderr
    ends_as(project, serial)
    assert {record.dagster_run.status for record in runs(project)} == {dg.DagsterRunStatus.SUCCESS}
    times = {
        (record.dagster_run.job_name, record.dagster_run.tags.get("dagster/partition")): record
        for record in runs(project)
    }
    beside = [
        (explored, trained)
        for explored, trained in product(range(2, ROUNDS + 1), range(1, ROUNDS))
        if (ahead := times["explore_job", f"r{explored:04d}"]).start_time
        < (sync := times["sync_round_job", f"r{trained:04d}"]).end_time
        and sync.start_time < ahead.end_time
    ]
    assert beside == [(2, 1), (3, 2), (4, 3)]


def test_ctrl_c_cancels_both_launches_and_the_same_command_continues(make_project, serial, tmp_path: Path) -> None:
    project = project_of(make_project, "interrupted")
    output, ahead = tmp_path / "output.txt", project.home / "rounds" / "r0002" / "snapshot-policy.json"

    def both_run() -> bool:
        """Whether an exploration ahead runs beside a training. Its weights are chosen: the next drive takes them."""
        started = {
            (each.dagster_run.job_name, each.dagster_run.tags.get("dagster/partition"))
            for each in runs(project)
            if each.dagster_run.status is dg.DagsterRunStatus.STARTED
        }
        return {("explore_job", "r0002"), ("sync_round_job", "r0001")} <= started and ahead.exists()

    with (
        output.open("w") as stream,
        subprocess.Popen(
            project.command("run", "--config", str(project.config)),
            env=project.environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        ) as driver,
    ):
        wait_for(both_run, "an exploration and a training run", 120)
        os.kill(driver.pid, signal.SIGINT)
        assert driver.wait(60) == 130
    said = output.read_text()
    assert "failed" not in said and "Traceback" not in said, said
    assert not {record.dagster_run.status for record in runs(project)} & UNFINISHED
    project.rft("run", "--config", str(project.config))
    assert project.rft("store", "check").returncode == 0
    assert explored_with(project) == explored_with(serial)
    ends_as(project, serial)
