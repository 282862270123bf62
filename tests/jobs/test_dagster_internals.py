"""The private parts of Dagster that the platform calls or overrides are those of the releases that it was tested with.

If a test fails here with a new release, read how the named part changed in it, adapt the module of
``jobs/dagster_internals`` that uses the part, and correct the table.
"""

import inspect
from pydoc import locate

import dagster as dg
import pytest
from dagster._core.launcher import DefaultRunLauncher
from dagster._grpc import impl

from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.run_launcher import pid_in
from rft_platform.jobs.instance import open_instance

INSTANCE = "dagster._core.instance.DagsterInstance"
EVENT_LOG = "dagster._core.storage.event_log.SqliteEventLogStorage"
LAUNCHER = "dagster._core.launcher"
ORIGIN = "dagster._core.remote_origin"
#: The parameters of each part; those with a default value in brackets.
USED = {
    f"{INSTANCE}.add_run_tags": "self, run_id, new_tags",
    f"{INSTANCE}.from_ref": "instance_ref",
    f"{INSTANCE}.get_yaml_python_handlers": "self",
    f"{INSTANCE}.handle_new_event": "self, event, [batch_metadata]",
    f"{INSTANCE}.report_engine_event": "self, message, [dagster_run], [engine_event_data], [cls], [step_key], "
    "[job_name], [run_id]",
    f"{INSTANCE}.report_run_canceled": "self, dagster_run, [message]",
    f"{INSTANCE}.store_event": "self, event",
    f"{INSTANCE}.update_tick": "self, tick",
    "dagster._core.instance.ref.InstanceRef.config_defaults": "base_dir",
    "dagster._core.instance.ref.InstanceRef.from_dir": "base_dir, [config_dir], [config_filename], [overrides]",
    f"{LAUNCHER}.CheckRunHealthResult": "status, [msg], [transient], [run_worker_id]",
    f"{LAUNCHER}.DefaultRunLauncher": "[inst_data]",
    f"{LAUNCHER}.DefaultRunLauncher.check_run_worker_health": "self, run",
    f"{LAUNCHER}.DefaultRunLauncher.launch_run": "self, context",
    f"{LAUNCHER}.DefaultRunLauncher.terminate": "self, run_id",
    f"{LAUNCHER}.LaunchRunContext": "dagster_run, workspace",
    f"{ORIGIN}.ManagedGrpcPythonEnvCodeLocationOrigin": "loadable_target_origin, [location_name]",
    f"{ORIGIN}.RemoteRepositoryOrigin.get_job_origin": "self, job_name",
    "dagster._core.scheduler.instigation.InstigatorTick": "tick_id, tick_data",
    f"{EVENT_LOG}._connect": "self, shard",
    f"{EVENT_LOG}._initdb": "self, engine, [for_index_shard]",
    f"{EVENT_LOG}.claim_concurrency_slot": "self, concurrency_key, run_id, step_key, [priority]",
    f"{EVENT_LOG}.conn_string_for_shard": "self, shard_name",
    f"{EVENT_LOG}.free_concurrency_slots_for_run": "self, run_id",
    f"{EVENT_LOG}.get_asset_check_execution_history": "self, check_key, limit, [cursor], [status], [partition_filter]",
    f"{EVENT_LOG}.get_concurrency_info": "self, concurrency_key",
    f"{EVENT_LOG}.path_for_shard": "self, run_id",
    "dagster._core.storage.runs.SqliteRunStorage.connect": "self",
    "dagster._core.storage.noop_compute_log_manager.NoOpComputeLogManager": "[inst_data]",
    "dagster._serdes.deserialize_value": "val, [as_type], [whitelist_map]",
    "dagster._serdes.serialize_value": "val, [whitelist_map], json_kwargs",
    "dagster._utils.concurrency.ConcurrencyClaimStatus.with_sleep_interval": "self, interval",
    "dagster._utils.interrupts.check_captured_interrupt": "",
}


@pytest.mark.parametrize("name", USED)
def test_a_part_of_dagster_has_the_parameters_that_the_platform_expects(name: str) -> None:
    part = locate(name)
    assert part is not None
    found = inspect.signature(part).parameters.values()  # type: ignore[arg-type]
    assert ", ".join(each.name if each.default is each.empty else f"[{each.name}]" for each in found) == USED[name]


def test_dagsters_launcher_still_watches_no_worker() -> None:
    """If this fails, Dagster's own launcher does what ours adds: remove that from ours."""
    assert not DefaultRunLauncher().supports_check_run_worker_health


def test_a_run_worker_still_logs_its_process_id() -> None:
    assert "Started process for run (pid: {pid})." in inspect.getsource(impl)
    assert pid_in("Started process for run (pid: 11).") == 11


def test_the_origin_of_a_job_is_still_missing_in_process(tmp_path) -> None:
    """If this fails, Dagster records the origin itself: remove it from ``DriverInstance``."""

    @dg.job
    def empty_job() -> None:
        pass

    with open_instance(Home(tmp_path)) as instance:
        run = empty_job.execute_in_process(instance=instance).dagster_run
    assert run.remote_job_origin is None
