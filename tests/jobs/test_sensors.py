"""Sensors: launch what the plan says, once, and say in words what they wait for."""

import dagster as dg
import pytest
import yaml

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.experience.record import JudgedRow
from rft_platform.jobs.driver_lock import driver_lock
from rft_platform.jobs.jobs import asset_jobs
from rft_platform.jobs.sensors import evaluation_schedule, experience_threshold_sensor, next_round_sensor
from rft_platform.object_store.mirror import open_mirror
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write

JOBS = asset_jobs(PLAIN_NAMES)
NEXT_ROUND = next_round_sensor(PLAIN_NAMES, JOBS)
THRESHOLD = experience_threshold_sensor(PLAIN_NAMES, JOBS["sync_round_job"])
NIGHTLY = evaluation_schedule(PLAIN_NAMES, JOBS["evaluate_job"], None)


@pytest.fixture(autouse=True)
def _frequent_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rft_platform.object_store.driver_heartbeat._BEAT_S", 0.2)


@pytest.fixture
def resource(project) -> ProjectResource:
    return ProjectResource(home=str(project.home.root))


def publish_round(project: Project, number: int) -> None:
    """Leave the notes that a synced round (0: the warm start) leaves."""
    publish(project.store, Policy(folder="f", policy_version=number, weights_digest="d", round=number))
    write(project.store, number, RoundEvaluation(gate="no champion", gate_passed=None))


def tick(sensor: dg.SensorDefinition, resource: ProjectResource, instance: dg.DagsterInstance):
    context = dg.build_sensor_context(instance=instance, resources={"project": resource})
    return sensor(context)


def test_the_sensor_skips_a_folder_without_a_project_with_a_reason(tmp_path):
    with dg.DagsterInstance.ephemeral() as instance:
        skipped = tick(NEXT_ROUND, ProjectResource(home=str(tmp_path)), instance)
    assert isinstance(skipped, dg.SkipReason)
    assert "rft run" in skipped.skip_message


def test_the_warm_start_comes_first_then_round_one_with_its_partition(project, resource):
    with dg.DagsterInstance.ephemeral() as instance:
        (first,) = tick(NEXT_ROUND, resource, instance).run_requests
        assert (first.job_name, first.run_key, first.partition_key) == ("warm_start_job", "warm_start:r0000:0", None)

        publish_round(project, 0)
        result = tick(NEXT_ROUND, resource, instance)
        (request,) = result.run_requests
        assert (request.job_name, request.run_key, request.partition_key) == ("explore_job", "explore:r0001:0", "r0001")
        assert request.tags["rft/round"] == "r0001"
        (added,) = result.dynamic_partitions_requests
        assert added.partition_keys == ["r0001"]


def test_ticks_show_other_hosts_that_a_daemon_drives_the_project(project, resource, tmp_path):
    mirror = open_mirror(project.home.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    with dg.DagsterInstance.ephemeral() as instance:
        tick(NEXT_ROUND, resource, instance)
    with pytest.raises(UserError, match="drives this project: on that host wait for"):
        open_mirror(tmp_path / "second", f"file://{tmp_path}/bucket").take_over()
    mirror.driven_for(0.0)


def test_training_waits_for_rows_and_reports_their_number(project, resource):
    publish_round(project, 0)
    with dg.DagsterInstance.ephemeral() as instance:
        skipped = tick(THRESHOLD, resource, instance)
        assert isinstance(skipped, dg.SkipReason)
        assert "r0001 trains when it is explored" in skipped.skip_message

        write(project.store, 1, Judged(sound=True, judge_version="match@1"))
        (request,) = tick(THRESHOLD, resource, instance).run_requests
        assert (request.job_name, request.run_key) == ("sync_round_job", "sync:r0001:0")


def test_rows_that_a_blocking_check_refused_start_no_training(project, resource):
    publish_round(project, 0)
    write(project.store, 1, Judged(sound=False))
    with dg.DagsterInstance.ephemeral() as instance:
        assert isinstance(tick(THRESHOLD, resource, instance), dg.SkipReason)


@pytest.fixture
def dynamic(project) -> ProjectResource:
    """The project in the style ``dynamic_by_explorer``, whose steps take more than one batch; nothing has run yet."""
    config = yaml.safe_load(project.home.config_file.read_text())
    config["buffer"]["train_batch_size"] = 6
    config["synchronizer"] = {"sync_style": "dynamic_by_explorer"}
    write_text(project.home.config_file, yaml.safe_dump(config))
    publish_round(project, 0)
    return ProjectResource(home=str(project.home.root))


def test_a_dynamic_style_explores_on_and_trains_what_has_landed(dynamic):
    store = dynamic.open().store
    with dg.DagsterInstance.ephemeral() as instance:
        for number in (1, 2):
            (request,) = tick(NEXT_ROUND, dynamic, instance).run_requests
            assert request.run_key == f"explore:r000{number}:0", "without waiting for training"
            skipped = tick(THRESHOLD, dynamic, instance)
            assert f"r0001 waits: {4 * (number - 1)} of 6 experiences have landed" in skipped.skip_message
            rows = [JudgedRow(f"{number}-{i}", f"{number}", f"{i}", 0, 1.0, {}, "v", 0.0) for i in range(4)]
            store.write_judged(number, "v", rows)
            write(store, number, Judged(sound=True, judge_version="match@1"))
        (request,) = tick(THRESHOLD, dynamic, instance).run_requests
        assert (request.job_name, request.run_key) == ("sync_round_job", "sync:r0001:0")
        waiting = tick(NEXT_ROUND, dynamic, instance)
        assert isinstance(waiting, dg.SkipReason), "all batches of the run are explored"


def test_the_sensor_reports_a_finished_budget(project, resource):
    for number in range(3):
        publish_round(project, number)
        write(project.store, number, Judged(sound=True, judge_version="match@1"))
    with dg.DagsterInstance.ephemeral() as instance:
        skipped = tick(NEXT_ROUND, resource, instance)
    assert skipped.skip_message == "all rounds of the budget are done"


def test_the_schedule_evaluates_the_newest_policy(project, resource, tmp_path):
    assert NIGHTLY.default_status is dg.DefaultScheduleStatus.STOPPED
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        context = dg.build_schedule_context(instance=instance, resources={"project": resource})
        assert isinstance(NIGHTLY(context), dg.SkipReason)
        publish_round(project, 0)
        publish_round(project, 1)
        request = NIGHTLY(context)
        assert request.partition_key == "r0001"
        assert "r0001" in instance.get_dynamic_partitions(str(PLAIN_NAMES.rounds.name))
        with driver_lock(project.home):
            assert NIGHTLY(context) == dg.SkipReason("`rft run` or `rft demo` is driving this project")


def test_an_offline_training_is_launched_by_the_same_sensor(tmp_path):
    config = {
        "mode": "train",
        "model": {"model_path": "unused"},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"train_batch_size": 1, "trainer_input": {"experience_buffer": {"path": "unused.jsonl"}}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    resource = ProjectResource(home=str(home.root))
    with dg.DagsterInstance.ephemeral() as instance:
        (request,) = tick(NEXT_ROUND, resource, instance).run_requests
        assert (request.job_name, request.run_key, request.partition_key) == ("sft_job", "sft:r0001:0", "r0001")
        publish_round(Project.open(home), 1)
        skipped = tick(NEXT_ROUND, resource, instance)
    assert isinstance(skipped, dg.SkipReason)
    assert "all rounds" in skipped.skip_message
