"""Ctrl-C and SIGTERM end `rft run` while it waits for a pool slot that another run has."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
from interface import wait_for

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOLS = ("engine", "trainer")


@pytest.fixture(scope="module")
def occupied(make_project) -> Iterator[tuple[Any, dg.DagsterInstance, str]]:
    """A project in which a run of someone else has both pools."""
    project = make_project("occupied", explorer={"eval_on_startup": False})
    with open_instance(Home(project.home)) as instance:
        holder = dg.DagsterRun(job_name="explore_job", status=dg.DagsterRunStatus.STARTED)
        instance.add_run(holder)
        for pool in POOLS:
            instance.event_log_storage.initialize_concurrency_limit_to_default(pool)
            instance.event_log_storage.claim_concurrency_slot(pool, holder.run_id, "rollouts")
        yield project, instance, holder.run_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_pool(occupied, tmp_path: Path, number: signal.Signals) -> None:
    project, instance, holder = occupied
    command = project.command("run", "--config", str(project.config))
    output = tmp_path / "output.txt"
    with (
        output.open("w") as stream,
        subprocess.Popen(
            command, env=project.environment, stdout=stream, stderr=stream, start_new_session=True
        ) as driver,
    ):
        wait_for(lambda: f"run {holder[:8]} (explore_job)" in output.read_text(), "the wait is told", 120)
        used = sum(psutil.Process(driver.pid).cpu_times()[:2])
        time.sleep(3)
        assert sum(psutil.Process(driver.pid).cpu_times()[:2]) - used < 1, "the wait uses no processor"
        began = time.monotonic()
        os.kill(driver.pid, number)
        assert driver.wait(60) == 130
        assert time.monotonic() - began < 10
    said = output.read_text().splitlines()
    assert [line for line in said if line.startswith("interrupted")] == [said[-1]]
    assert "Traceback" not in output.read_text()
    ended = {run.run_id: run.status for run in instance.get_runs() if run.run_id != holder}
    assert set(ended.values()) <= {dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS}
    for pool in POOLS:
        found = instance.event_log_storage.get_concurrency_info(pool)
        assert {slot.run_id for slot in found.claimed_slots} == {holder}
        assert {step.run_id for step in found.pending_steps} == {holder}
