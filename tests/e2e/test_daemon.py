"""Rounds under Dagster's daemon: closed by sensors alone, whatever is killed, cancelled or launched twice meanwhile.

CI also runs this file with the newest Dagster that the next release of the platform may meet.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml
from interface import FINISHED, Ui, running_ui, stretched, wait_for

from rft_platform.assets.run_failure import CAUSE_TAG
from rft_platform.cluster.local.leases import read_lease
from rft_platform.common.files import digest_file
from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.run_launcher import RunWorkers
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import connect_engine, connect_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOT_FINISHED = [status for status in dg.DagsterRunStatus if status.value not in FINISHED]
WORKSPACE = str(Path(__file__).parents[2] / "workspace.yaml")


def lasting(tiny_model, rounds: int, offset: int, tasks: int) -> dict:
    """Settings of rounds whose exploration and training take seconds, so that things can happen meanwhile."""
    return {
        "model": {"model_path": str(tiny_model), "max_model_len": 128, "max_response_tokens": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 16, "optimizer": {"lr": 1e-4}},
        "synchronizer": {"sync_offset": offset},
        "evaluation": {"every": rounds},
        "buffer_settings": {"batch_size": tasks, "train_batch_size": 32, "total_steps": rounds},
    }


@pytest.fixture(scope="module")
def make_lasting(make_project, tiny_model):
    """Make a project of ``lasting`` rounds."""

    def make(name: str, rounds: int, offset: int, tasks: int):
        settings = lasting(tiny_model, rounds, offset, tasks)
        sizes = settings.pop("buffer_settings")
        project = make_project(name, **settings)
        config = yaml.safe_load(project.config.read_text())
        config["buffer"].update(sizes)
        project.config.write_text(yaml.safe_dump(config))
        return project

    return make


def successes(home: Path) -> Counter:
    """How often each job succeeded for each round."""
    with open_instance(Home(home)) as instance:
        runs = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS]))
    return Counter((run.job_name, run.tags.get("dagster/partition")) for run in runs)


def each_phase_once(rounds: int) -> dict:
    """What ``successes`` says of a project whose work was done without doubling."""
    keys = [f"r{number:04d}" for number in range(1, rounds + 1)]
    return {("warm_start_job", None): 1} | {(job, key): 1 for job in ("explore_job", "sync_round_job") for key in keys}


def is_done(home: Path, rounds: int) -> bool:
    """Whether every phase has succeeded and no run is left; ``successes`` says whether one was doubled."""
    with open_instance(Home(home)) as instance:
        left = instance.get_runs_count(dg.RunsFilter(statuses=NOT_FINISHED))
    return not left and set(successes(home)) >= set(each_phase_once(rounds))


def spans(home: Path, step: str) -> dict[str, tuple[float, float]]:
    """Start and end of a step that succeeded, by round."""
    found = {}
    with open_instance(Home(home)) as instance:
        for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS])):
            for stats in instance.get_run_step_stats(run.run_id, step_keys=[step]):
                found[run.tags["dagster/partition"]] = (stats.start_time, stats.end_time)
    return found


@pytest.mark.timeout(600)
def test_the_daemon_completes_all_rounds_and_exploration_overlaps_training(make_lasting):
    project = make_lasting("overlap", rounds=3, offset=1, tasks=16)
    with running_ui(project, "--auto"):
        last = project.home / "rounds" / "r0003" / "evaluation.json"
        wait_for(last.exists, "round 3 is evaluated", 480)
        wait_for(lambda: is_done(project.home, 3), "the last run ends", 120)
        time.sleep(3)  # three ticks more: nothing is launched beyond the budget
        assert successes(project.home) == each_phase_once(3)
    explored, trained = spans(project.home, "rollout_batches"), spans(project.home, "policy_checkpoint")
    overlap = [
        min(explored[later][1], trained[former][1]) - max(explored[later][0], trained[former][0])
        for former, later in (("r0001", "r0002"), ("r0002", "r0003"))
    ]
    assert max(overlap) > 0.5, overlap
    behind = [number - 1 - project.note(number, "explore")["policy_round"] for number in (1, 2, 3)]
    assert max(behind) == 1, "exploration ran ahead by the offset, and no further"


@pytest.fixture(scope="module")
def disturbed(make_lasting):
    """A project after its warm start, with its interface running and the sensors off."""
    project = make_lasting("disturbed", rounds=2, offset=0, tasks=32)
    with running_ui(project) as ui:
        ui.run_to_success("warm_start_job")
        ui.add_round("r0001")
        yield ui, project


def slots(project) -> int:
    """Pool slots that are taken or waited for."""
    with open_instance(Home(project.home)) as instance:
        storage = instance.event_log_storage
        return sum(storage.get_concurrency_info(pool).active_slot_count for pool in ("engine", "trainer"))


def opened(project) -> Project:
    return Project.open(Home(project.home))


def is_training(project) -> bool:
    lease = read_lease(project.home / "leases" / "trainer.json")
    return lease is not None and bool(connect_trainer(opened(project)).status()["busy"])


def worker_of(project, run: str) -> psutil.Process:
    with open_instance(Home(project.home)) as instance:
        reported = RunWorkers().reported(instance, run)
    assert reported is not None
    return psutil.Process(reported[0])


def computes(project) -> bool:
    """Whether the engine computes: it uses the processor for more than answers to questions about its state."""
    engine = connect_engine(opened(project))
    before = engine.status().cpu_seconds
    time.sleep(stretched(1))
    return engine.status().cpu_seconds - before > 0.3


@contextmanager
def exploring_for_minutes(project) -> Iterator[None]:
    """Runs that are launched in the block explore many times the tasks' usual number of answers."""
    file = project.home / "rft.yaml"
    usual = file.read_text()
    config = yaml.safe_load(usual)
    config["algorithm"]["repeat_times"] *= 40
    file.write_text(yaml.safe_dump(config))
    try:
        yield
    finally:
        file.write_text(usual)


def test_cancelled_rollouts_end_within_seconds_and_leave_the_engine_idle(disturbed):
    ui, project = disturbed
    with exploring_for_minutes(project):
        run = ui.launch("explore_job", "r0001")
        wait_for(lambda: computes(project), "rollouts begin", 240)
        limit, started = stretched(10), time.monotonic()
        ui.terminate(run)
        assert ui.end_of(run) == "CANCELED"
        assert time.monotonic() - started < limit
    wait_for(lambda: slots(project) == 0, "pool slots are free", limit)
    wait_for(lambda: not computes(project), "the engine no longer works for nobody", limit)
    assert not (project.home / "rounds" / "r0001" / "explore.json").exists()


def launch_twice(ui: Ui, project, job: str, key: str, stored: Callable[[], object]) -> None:
    """Launch a job for a round twice at once: the second run waits for the first, then changes nothing and says why."""
    first, second = ui.launch(job, key), ui.launch(job, key)
    assert ui.end_of(first) == "SUCCESS"
    before = stored()
    assert ui.end_of(second) == "FAILURE"
    assert stored() == before
    with open_instance(Home(project.home)) as instance:
        records = [instance.get_run_record_by_id(run) for run in (first, second)]
    assert records[0].end_time <= records[1].start_time
    assert f"run {first} of the same job did this" in records[1].dagster_run.tags[CAUSE_TAG]


def rows(project) -> dict[str, str]:
    """The digest of each file of rows and judgements of round 1."""
    folder = project.home / "rounds" / "r0001"
    return {file.name: digest_file(file) for file in folder.rglob("*.parquet")}


def weights(project) -> tuple[str, str, dict[str, str]]:
    """The policy and model version of round 2, and the digest of each of its files of weights."""
    policy = project.note(2, "policy")
    files = {file.name: digest_file(file) for file in Path(policy["folder"]).glob("*.safetensors")}
    assert files
    return policy["weights_digest"], policy["model_version"], files


def test_of_two_explorations_launched_at_once_the_later_waits_and_changes_nothing(disturbed):
    ui, project = disturbed
    launch_twice(ui, project, "explore_job", "r0001", lambda: rows(project))
    assert project.note(1, "explore")["rows"] == 512


def test_cancelled_training_frees_the_trainer_within_seconds(disturbed):
    ui, project = disturbed
    run = ui.launch("sync_round_job", "r0001")
    wait_for(lambda: is_training(project), "the training begins")
    limit, started = stretched(15), time.monotonic()
    ui.terminate(run)
    assert ui.end_of(run) == "CANCELED"
    wait_for(lambda: not is_training(project), "the trainer is idle", limit)
    wait_for(lambda: slots(project) == 0, "pool slots are free", limit)
    assert time.monotonic() - started < limit
    assert not (project.home / "rounds" / "r0001" / "policy-policy.json").exists()


def test_a_killed_run_worker_is_found_and_its_slot_is_freed(disturbed):
    ui, project = disturbed
    run = ui.launch("sync_round_job", "r0001")
    wait_for(lambda: is_training(project), "the training begins")
    worker = worker_of(project, run)
    server = worker.parent()
    assert server is not None
    server.suspend()  # a code server that does not see it either
    try:
        limit, started = stretched(20), time.monotonic()
        worker.kill()
        assert ui.end_of(run, timeout=limit) == "FAILURE"
        wait_for(lambda: slots(project) == 0, "pool slots are free", limit)
        assert time.monotonic() - started < limit
    finally:
        server.resume()


def test_daemons_killed_and_doubled_close_the_rounds_without_doing_anything_twice(disturbed):
    ui, project = disturbed
    environment = project.environment | {"DAGSTER_HOME": str(project.home / "dagster"), "RFT_SENSOR_INTERVAL_S": "1"}
    before = successes(project.home)
    with (project.home / "logs" / "second-daemon.log").open("w") as log:
        second = subprocess.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-w", WORKSPACE], env=environment, stdout=log, stderr=log
        )
    try:
        ui.start_sensors()
        wait_for(lambda: is_training(project), "round 1 is trained again")
        ui.child("dagster-daemon").kill()
        ui.child("rft_platform.servers.dagster_server").kill()
        last = project.home / "rounds" / "r0002" / "evaluation.json"
        wait_for(last.exists, "round 2 is evaluated", 480)
        wait_for(lambda: is_done(project.home, 2), "the last run ends", 120)
        done = {("warm_start_job", None), ("explore_job", "r0001")}
        assert successes(project.home) - before == {key: 1 for key in each_phase_once(2) if key not in done}
    finally:
        second.terminate()
        second.wait(timeout=stretched(30))
    assert ui.ask("{ version }")["version"], "the webserver was started again"
    assert ui.process.poll() is None


def test_of_two_trainings_launched_at_once_the_later_waits_and_changes_nothing(disturbed):
    ui, project = disturbed
    launch_twice(ui, project, "sync_round_job", "r0002", lambda: weights(project))


def test_a_backfill_judges_old_rounds_again_and_keeps_both_judgements(disturbed):
    ui, project = disturbed
    config = {"ops": {"judged_experiences": {"config": {"judge": "judge_by_digits:share_of_ones"}}}}
    before = project.note(1, "judge")["judge_version"]
    assert ui.backfill(["r0001", "r0002"], config, "judge_job") == ["SUCCESS", "SUCCESS"]
    for number in (1, 2):
        folder = project.home / "rounds" / f"r{number:04d}" / "judged"
        assert len(list(folder.glob("*.parquet"))) == 2
    told = ui.metadata("judged_experiences", "r0001")
    now = project.note(1, "judge")["judge_version"]
    assert now != before
    assert told["judge_version"]["text"] == now
    records = [str(record) for record in told["judge_versions"]["table"]["records"]]
    assert len(records) == 2
    assert any(now in record for record in records)
    assert any(before in record for record in records)


def test_a_second_interface_on_the_same_home_is_refused(disturbed):
    ui, project = disturbed
    refused = subprocess.run(
        project.command("ui", "--port", "39871"),
        env=os.environ | project.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
    assert f"process {ui.process.pid}" in refused.stderr
    assert ui.ask("{ version }")["version"]  # the first one still answers
