"""The launcher: a run is started once, a phase of a round once at a time; dead workers are told from living ones."""

import subprocess
import sys

import dagster as dg
import psutil
import pytest
from dagster._core.launcher import DefaultRunLauncher, LaunchRunContext, WorkerStatus

from rft_platform.config.home import Home
from rft_platform.definitions import defs
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.tags import DRIVER_TAG, driver_tags
from rft_platform.jobs.workers import Workers, birth, pid_in


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


def new_run(instance, job="explore_job", partition="r0001", status=dg.DagsterRunStatus.STARTING, **tags):
    named = {"dagster/partition": partition} if partition else {}
    return instance.create_run_for_job(defs.resolve_job_def(job), status=status, tags={**named, **tags})


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


def test_of_two_runs_of_a_phase_the_later_is_refused_and_names_the_other(instance, started):
    first, second, elsewhere = new_run(instance), new_run(instance), new_run(instance, partition="r0002")
    for run in (first, second, elsewhere):
        launch(instance, run)
    assert started == [first.run_id, elsewhere.run_id]
    refused = instance.get_run_by_id(second.run_id)
    assert refused.status is dg.DagsterRunStatus.FAILURE
    assert first.run_id in refused.tags["rft/cause"]


def test_a_phase_that_a_living_driver_runs_is_not_launched_beside_it(instance, started):
    dead = {DRIVER_TAG: f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"}
    new_run(instance, partition="r0002", status=dg.DagsterRunStatus.STARTED, **dead)
    driven = new_run(instance, status=dg.DagsterRunStatus.STARTED, **driver_tags())
    beside, free = new_run(instance), new_run(instance, partition="r0002")
    launch(instance, beside)
    launch(instance, free)
    assert started == [free.run_id]
    assert driven.run_id in instance.get_run_by_id(beside.run_id).tags["rft/cause"]


def test_a_phase_can_be_launched_again_after_its_run_has_ended(instance, started):
    first = new_run(instance)
    launch(instance, first)
    instance.report_run_failed(first)
    second = new_run(instance)
    launch(instance, second)
    assert started == [first.run_id, second.run_id]


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


def test_a_pid_that_serves_another_program_now_is_no_worker():
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert Workers().find("run", other.pid) is None
        workers = Workers(births={"run": birth(psutil.Process().pid) - 1})
        assert workers.find("run", psutil.Process().pid) is None, "born at another time than the run's worker"
    finally:
        other.kill()
        other.wait()


def test_a_driven_run_lives_as_long_as_its_driver(instance):
    launcher = instance.run_launcher
    dead = {DRIVER_TAG: f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"}
    states = [
        launcher.check_run_worker_health(new_run(instance, status=dg.DagsterRunStatus.STARTED, **tags)).status
        for tags in (driver_tags(), dead)
    ]
    assert states == [WorkerStatus.RUNNING, WorkerStatus.FAILED]


def test_cancelling_a_run_whose_worker_and_code_server_are_gone_ends_it_at_once(instance):
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
print("multiprocessing", flush=True)
try:
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
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    say_pid(instance, run, gone.pid)
    assert instance.run_launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING
    assert not instance.run_launcher.terminate(run.run_id)
    assert not instance.get_run_by_id(run.run_id).is_finished


def test_claims_of_ended_runs_are_forgotten(instance, started, tmp_path, monkeypatch):
    monkeypatch.setattr("rft_platform.jobs.run_launcher._MANY", 3)
    runs = [new_run(instance, partition=f"r{number:04d}") for number in range(1, 7)]
    for run in runs:
        launch(instance, run)
        instance.report_run_failed(run)
    kept = [file for file in (tmp_path / "dagster" / "launched").iterdir() if not file.name.startswith(".")]
    assert len(kept) <= 4


def test_the_newest_pid_counts():
    messages = ["Started process for run (pid: 11).", None, "Process for run exited (pid: 11)."]
    assert pid_in(messages) == 11
    assert pid_in([]) is None
