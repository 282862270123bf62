"""The project's Dagster instance: created on first use, cleaned up after a dead driver."""

import dagster as dg

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.driver_instance import load_instance
from rft_platform.jobs.dagster_internals.run_workers import driver_is_alive, driver_of
from rft_platform.jobs.dagster_yaml import REPAIR_SETTINGS, ensure_settings, ensure_storage


def open_instance(home: Home, capture_output: bool = True) -> dg.DagsterInstance:
    """The instance in ``RFT_HOME/dagster``, created with the platform's settings on first use.

    ``capture_output=False`` is for a driver: the output of the runs in this process goes to the process's standard
    output and is not captured.
    """
    with locked(home.dagster / "instance"):  # two processes that create Dagster's tables at once corrupt them
        ensure_settings(settings := home.dagster / "dagster.yaml")
        ensure_storage(settings)
        try:
            return load_instance(home.dagster, capture_output)
        except dg.DagsterInvalidConfigError as error:
            found = [found.message.split(" Expected: ")[0] for found in error.errors]
            raise UserError(f"{settings}: {'; '.join(found)} {REPAIR_SETTINGS}") from error


def end_orphaned_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs whose driver process is gone as failed, and free their pool slots; returns their ids.

    Dagster's run monitoring does so for runs that the daemon launched, but not for runs in a driver's process. The
    slots of runs that are already marked as failed are freed too: a process killed between both steps leaves them.
    """
    open_runs = instance.get_runs(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
        )
    )
    orphans = [run for run in open_runs if is_orphaned(run)]
    for run in orphans:
        instance.report_run_failed(run, "The process that drove this run ended before the run did.")
    _free_slots_of_orphans(instance)
    return [run.run_id for run in orphans]


def _free_slots_of_orphans(instance: dg.DagsterInstance) -> None:
    """Free the pool slots of runs whose driver has ended; a step that waits for such a slot would never start."""
    storage = instance.event_log_storage
    for run_id in storage.get_concurrency_run_ids():
        run = instance.get_run_by_id(run_id)
        if run is None or (run.is_finished and is_orphaned(run)):
            storage.free_concurrency_slots_for_run(run_id)


def is_orphaned(run: dg.DagsterRun) -> bool:
    """Whether the run was executed by a driver process that is gone."""
    driver = driver_of(run)
    return driver is not None and not driver_is_alive(driver)
