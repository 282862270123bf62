"""The project's Dagster instance: made on first use, tidied after a driver that died."""

import dagster as dg
from dagster._core.instance.ref import InstanceRef

from rft_platform.config.home import Home
from rft_platform.jobs.settings import ensure_settings
from rft_platform.jobs.storage import ensure_storage
from rft_platform.jobs.tags import DRIVER_TAG, driver_is_alive

#: A driver's output is its caller's: capturing it a second time for the UI costs every round a sixth of a second.
_NO_COMPUTE_LOGS = {
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
}


def open_instance(home: Home, capture_output: bool = True) -> dg.DagsterInstance:
    """The instance in ``RFT_HOME/dagster``, with the platform's settings on first use.

    With ``capture_output`` false, what runs in this process print is left on its standard output.
    """
    ensure_settings(settings := home.dagster / "dagster.yaml")
    ensure_storage(settings)
    overrides = None if capture_output else _NO_COMPUTE_LOGS
    return dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(home.dagster), overrides=overrides))


def end_orphaned_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs as failed whose driver process is gone, and free their pool slots; returns their ids.

    Run monitoring does this for runs the daemon launched; nobody watches a run that lived in a driver's process.
    """
    open_runs = instance.get_runs(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
        )
    )
    orphans = [run for run in open_runs if DRIVER_TAG in run.tags and not driver_is_alive(run.tags[DRIVER_TAG])]
    for run in orphans:
        instance.report_run_failed(run, "The process that drove this run ended before the run did.")
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return [run.run_id for run in orphans]
