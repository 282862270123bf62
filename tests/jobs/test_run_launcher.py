"""The launcher starts each run once, notices dead workers, and cancels runs whose code server is gone."""

import signal
import subprocess
import sys
import time

import dagster as dg
import psutil
import pytest
from dagster._core.launcher import DefaultRunLauncher, LaunchRunContext, WorkerStatus

from rft_platform.assets.run_failure import fault_of, fault_tags
from rft_platform.cluster.local.processes import start_ticks
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.definitions import defs
from rft_platform.jobs.dagster_internals.run_launcher import (
    DRIVER_TAG,
    RunWorkers,
    driver_of,
    driver_tags,
    pid_in,
)
from rft_platform.jobs.instance import end_orphaned_runs, open_instance
from rft_platform.jobs.launches import launches

DRIVEN = "5a0c1f5e-6f0e-4d57-9d1c-0a8c2f1f7c11"


@pytest.fixture
def instance(tmp_path):
    with open_instance(Home(tmp_path)) as opened:
        yield opened


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Ids of the runs whose workers Dagster's own launcher was asked to start."""
    ids: list[str] = []
    monkeypatch.setattr(DefaultRunLauncher, "launch_run", lambda self, context: ids.append(context.dagster_run.run_id))
    return ids


def new_run(
    instance,
    job="explore_job",
    partition="r0001",
    status=dg.DagsterRunStatus.STARTING,
    run_id=None,
    parent=None,
    **tags,
):
    named = {"dagster/partition": partition} if partition else {}
    return instance.create_run_for_job(
        defs.resolve_job_def(job), run_id=run_id, status=status, tags={**named, **tags},
        parent_run_id=parent, root_run_id=parent,
    )  # fmt: skip


def executed_again(instance, run, **changes):
    """What "Re-execute" of the interface makes of a run: a new one, with all tags of the first."""
    tags = instance.get_run_by_id(run.run_id).tags
    return new_run(instance, parent=run.run_id, **{**tags, **changes})


def launch(instance, run) -> None:
    instance.run_launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))


def say_pid(instance, run, pid: int) -> None:
    instance.report_engine_event(f"Started process for run (pid: {pid}).", run)


def test_two_daemons_that_dequeue_one_run_start_one_worker(instance, started, tmp_path):
    run = new_run(instance)
    launch(instance, run)
    with open_instance(Home(tmp_path)) as of_another_daemon:
        launch(of_another_daemon, run)
    assert started == [run.run_id]
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTING


def test_a_launched_run_that_is_executed_again_is_launched_again(instance, started):
    first = new_run(instance)
    launch(instance, first)
    instance.report_run_failed(first)
    again = executed_again(instance, first)
    launch(instance, again)
    assert started == [first.run_id, again.run_id]


def test_health_follows_the_worker(instance):
    run = new_run(instance, status=dg.DagsterRunStatus.STARTED)
    launcher = instance.run_launcher
    assert launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING, "on its way"
    program = "import time; print('multiprocessing'); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", program])
    say_pid(instance, run, worker.pid)
    assert launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
    worker.kill()
    worker.wait()
    health = launcher.check_run_worker_health(run)
    assert health.status is WorkerStatus.FAILED
    assert str(worker.pid) in health.msg


def test_a_worker_that_is_stopped_for_long_is_killed_and_its_run_given_up(instance, monkeypatch):
    monkeypatch.setattr("rft_platform.jobs.dagster_internals.run_launcher.STOPPED_LIMIT_S", 0.3)
    run = new_run(instance, status=dg.DagsterRunStatus.STARTED)
    health = instance.run_launcher.check_run_worker_health
    worker = subprocess.Popen([sys.executable, "-c", "import time; 'multiprocessing'; time.sleep(600)"])
    try:
        say_pid(instance, run, worker.pid)
        worker.send_signal(signal.SIGSTOP)
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        found = [health(run).status]
        time.sleep(0.5)
        found.append(health(run).status)
        assert found == [WorkerStatus.RUNNING, WorkerStatus.FAILED]
        assert worker.wait(10) == -signal.SIGKILL
    finally:
        worker.kill()
        worker.wait(10)


def test_a_pid_that_serves_another_program_now_is_no_worker():
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert RunWorkers().find("run", other.pid, time.time()) is None
        workers = RunWorkers(start_times={"run": start_ticks(psutil.Process().pid) - 1})
        assert workers.find("run", psutil.Process().pid, time.time()) is None, (
            "born at another time than the run's worker"
        )
    finally:
        other.kill()
        other.wait()


def test_a_driven_run_lives_as_long_as_its_driver(instance):
    launcher = instance.run_launcher
    dead = {DRIVER_TAG: f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"}
    states = [
        launcher.check_run_worker_health(new_run(instance, status=dg.DagsterRunStatus.STARTED, **tags)).status
        for tags in ({"run_id": DRIVEN, **driver_tags(DRIVEN)}, dead)
    ]
    assert states == [WorkerStatus.RUNNING, WorkerStatus.FAILED]


def test_cancelling_a_run_without_worker_and_code_server_ends_it(instance):
    run = new_run(instance, status=dg.DagsterRunStatus.STARTED)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    say_pid(instance, run, gone.pid)
    assert instance.run_launcher.terminate(run.run_id)
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.CANCELED
    assert not instance.run_launcher.terminate(run.run_id), "it has ended"


def test_cancelling_interrupts_the_worker_where_the_code_server_is_gone(instance):
    program = """
import time
try:
    print("multiprocessing", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("in order")
"""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    worker.stdout.readline()
    run = new_run(instance, status=dg.DagsterRunStatus.STARTED)
    say_pid(instance, run, worker.pid)
    assert instance.run_launcher.terminate(run.run_id)
    assert worker.communicate(timeout=20)[0] == "in order\n"


def test_a_worker_in_another_container_is_left_alone(instance, started, tmp_path, monkeypatch):
    run = new_run(instance)
    monkeypatch.setattr("socket.gethostname", lambda: "daemon-container")
    launch(instance, run)
    monkeypatch.undo()
    run = instance.get_run_by_id(run.run_id)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    say_pid(instance, run, gone.pid)
    assert instance.run_launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
    assert not instance.run_launcher.terminate(run.run_id)
    assert not instance.get_run_by_id(run.run_id).is_finished


def test_the_newest_pid_counts(instance):
    run = new_run(instance)
    assert RunWorkers().reported(instance, run.run_id) is None
    for pid in (10, 11):
        say_pid(instance, run, pid)
    instance.report_engine_event("Process for run exited (pid: 11).", run)
    assert RunWorkers().reported(instance, run.run_id)[0] == 11
    assert pid_in(None) is None


@pytest.mark.slow
def test_a_driven_run_that_is_executed_again_does_not_share_its_dead_drivers_fate(instance, started):
    gone = f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}@{DRIVEN}"
    first = new_run(instance, run_id=DRIVEN, **{DRIVER_TAG: gone})
    instance.report_run_failed(first)
    again = executed_again(instance, first)
    assert again.tags[DRIVER_TAG] == gone
    assert driver_of(first) == gone
    assert driver_of(again) is None
    assert end_orphaned_runs(instance) == []
    launch(instance, again)
    assert started == [again.run_id]
    assert instance.run_launcher.check_run_worker_health(again).status is WorkerStatus.RUNNING


@pytest.mark.parametrize("launched", [True, False])
def test_a_run_that_is_executed_again_and_dies_silently_does_not_fail_for_the_old_cause(instance, started, launched):
    first = new_run(instance)
    instance.add_run_tags(first.run_id, fault_tags(UserError("no column x"), first.run_id))
    instance.report_run_failed(first)
    assert not launches(instance).failures[("explore", 1)].retryable
    again = executed_again(instance, first)
    assert again.tags["rft/cause"] == "no column x"
    if launched:
        launch(instance, again)
        assert not instance.get_run_by_id(again.run_id).tags["rft/cause"], "nor is it found by it"
    instance.report_run_failed(again)
    newest = launches(instance).failures[("explore", 1)]
    assert newest.retryable
    assert "without an error message" in newest.cause


def test_the_fault_of_a_run_that_was_executed_again_is_its_own(instance):
    first = new_run(instance)
    instance.add_run_tags(first.run_id, fault_tags(UserError("no column x"), first.run_id))
    again = executed_again(instance, first)
    instance.add_run_tags(again.run_id, fault_tags(UserError("no column y"), again.run_id))
    assert fault_of(instance.get_run_by_id(again.run_id))["rft/cause"] == "no column y"


def test_a_process_that_began_after_the_worker_had_reported_is_another_one():
    """Containers that are made anew hand out the same small pids; both programs look like workers."""
    program = "import time; 'multiprocessing'; print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()  # it runs: before that it may have no command line yet
        born = psutil.Process(process.pid).create_time()
        assert RunWorkers().find("run", process.pid, born - 60) is None
        workers = RunWorkers()
        assert workers.find("run", process.pid, born) is not None
        assert workers.find("run", process.pid, born - 3600) is not None, "seen before, and the clock was set since"
    finally:
        process.kill()
        process.communicate()
