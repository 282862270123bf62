"""The project's Dagster instance: its settings, and runs whose driver died."""

import dagster as dg
import psutil

from rft_platform.config.home import Home
from rft_platform.definitions import defs
from rft_platform.jobs.dagster_internals.run_launcher import DRIVER_TAG, driver_is_alive, driver_tags
from rft_platform.jobs.instance import end_orphaned_runs, open_instance
from rft_platform.jobs.launches import launches

DRIVEN = "5a0c1f5e-6f0e-4d57-9d1c-0a8c2f1f7c11"


def test_a_fresh_home_gets_the_platforms_settings(tmp_path):
    with open_instance(Home(tmp_path)) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.run_monitoring_enabled
        assert instance.global_op_concurrency_default_limit == 1


def test_only_a_living_driver_counts_as_alive():
    assert driver_is_alive(driver_tags(DRIVEN)[DRIVER_TAG])
    assert not driver_is_alive(f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}")


def test_runs_of_a_dead_driver_fail_and_others_continue(tmp_path):
    job = defs.resolve_job_def("warm_start_job")
    dead = f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"
    with open_instance(Home(tmp_path)) as instance:
        runs = {
            name: instance.create_run_for_job(
                job, run_id=DRIVEN if name == "driven" else None, status=dg.DagsterRunStatus.STARTED, tags=tags
            )
            for name, tags in {"orphan": {DRIVER_TAG: dead}, "driven": driver_tags(DRIVEN), "daemon": {}}.items()
        }
        assert end_orphaned_runs(instance) == [runs["orphan"].run_id]
        status = {name: instance.get_run_by_id(run.run_id).status for name, run in runs.items()}
    assert status["orphan"] is dg.DagsterRunStatus.FAILURE
    assert status["driven"] is status["daemon"] is dg.DagsterRunStatus.STARTED


def test_pool_slots_of_dead_drivers_are_freed_also_where_their_runs_are_marked_already(tmp_path):
    """A process that was killed between marking a run and freeing its slot left every later run waiting for ever."""
    job = defs.resolve_job_def("warm_start_job")
    dead = f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"
    step = "warm_start_checkpoint"
    with open_instance(Home(tmp_path)) as instance:
        storage = instance.event_log_storage
        storage.initialize_concurrency_limit_to_default("trainer")
        orphan = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={DRIVER_TAG: dead})
        assert storage.claim_concurrency_slot("trainer", orphan.run_id, step).is_claimed
        instance.report_run_failed(orphan, "killed before it freed the slot")
        later = instance.create_run_for_job(job, run_id=DRIVEN, tags=driver_tags(DRIVEN))
        assert not storage.claim_concurrency_slot("trainer", later.run_id, step).is_claimed
        assert end_orphaned_runs(instance) == []
        assert storage.claim_concurrency_slot("trainer", later.run_id, step).is_claimed


def test_a_run_whose_driver_died_is_known_as_interrupted_before_anybody_ends_it(tmp_path):
    job = defs.resolve_job_def("warm_start_job")
    dead = f"{psutil.Process().pid}@{psutil.Process().create_time() - 3600}"
    with open_instance(Home(tmp_path)) as instance:
        instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={DRIVER_TAG: dead})
        known = launches(instance)
        assert known.running == known.interrupted == {("warm_start", 0)}
        instance.create_run_for_job(job, run_id=DRIVEN, status=dg.DagsterRunStatus.STARTED, tags=driver_tags(DRIVEN))
        assert len(instance.get_runs()) == 2
