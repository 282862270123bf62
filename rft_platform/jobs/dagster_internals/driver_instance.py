"""Dagster's instance: load it, adapt it for processes that execute runs themselves, read what it has no public API for.

Upstream: ``execute_in_process`` does not record the origin of its job
(https://github.com/dagster-io/dagster/issues/19458, /issues/17707); there is no public query for the results of a check
by partition (/issues/17005). ``DagsterInstance.from_config`` loads a folder's instance, but takes no overrides. The
error of a failed blocking check and the file of a run's event log are not exported.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.errors import DagsterAssetCheckFailedError
from dagster._core.event_api import PartitionKeyFilter
from dagster._core.instance.ref import InstanceRef
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from rft_platform.jobs.dagster_internals.kept_connections import keep_connections
from rft_platform.jobs.dagster_internals.masked_instance import MaskedInstance

CODE_LOCATION, MODULE = "rft_platform", "rft_platform.definitions"  # as in workspace.yaml
#: Raised by ``execute_in_process`` when a blocking asset check fails; Dagster does not export it.
AssetCheckFailedError = DagsterAssetCheckFailedError
_RESULTS = 20  # more than a round is judged or evaluated again
#: A driver's output belongs to its caller's terminal. Capturing it for the UI costs a sixth of a second per round.
_OF_A_DRIVER = {
    "instance_class": {"module": __name__, "class": "DriverInstance"},
    "compute_logs": {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"},
}


def load_instance(folder: Path, capture_output: bool = True) -> dg.DagsterInstance:
    """The instance that ``folder/dagster.yaml`` describes; ``capture_output=False`` adapts it to a driver."""
    return dg.DagsterInstance.from_ref(
        InstanceRef.from_dir(str(folder), overrides=None if capture_output else _OF_A_DRIVER)
    )


def check_results(
    instance: dg.DagsterInstance, check: dg.AssetCheckKey, partition: str | None
) -> Sequence[AssetCheckExecutionRecord]:
    """The newest results of a check for one partition (None: of an asset without partitions), newest first.

    Dagster exports no class for the filter. Without it, the results of a project's other rounds are read as well.
    """
    only = PartitionKeyFilter(key=partition)
    return instance.event_log_storage.get_asset_check_execution_history(check, _RESULTS, partition_filter=only)


def event_log_file(instance: dg.DagsterInstance, run_id: str) -> Path | None:
    """The database file of a run's event log; None if one database holds all event logs (Postgres)."""
    storage = instance.event_log_storage
    return Path(storage.path_for_shard(run_id)) if isinstance(storage, SqliteEventLogStorage) else None


class DriverInstance(MaskedInstance):
    """Adds the origin of its job to every run created here, and lets two threads execute runs at the same time.

    Origin: ``execute_in_process`` omits it. Without it, Dagster's interface shows the run neither in the timeline nor
    on the page of its job, and cannot re-execute the run. Two threads: Dagster configures the log handlers of
    ``dagster.yaml`` again at the start of each run. It holds the lock of ``logging`` and waits for all handlers, while
    a run in the other thread that stores an event holds its handler and waits for this lock: a deadlock. The handlers
    are therefore configured once.

    Connections to SQLite files stay open until the instance is disposed of.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._yaml_handlers = super().get_yaml_python_handlers()
        self._close_connections = keep_connections(self)

    def dispose(self) -> None:
        """Close what the instance has open."""
        super().dispose()
        self._close_connections()

    def get_yaml_python_handlers(self) -> Sequence[logging.Handler]:
        """The log handlers of ``dagster.yaml``, configured once."""
        return self._yaml_handlers

    def create_run_for_job(self, job_def: dg.JobDefinition, *arguments: Any, **options: Any) -> dg.DagsterRun:
        """Create the run with its origin."""
        return super().create_run_for_job(
            job_def, *arguments, **{"remote_job_origin": job_origin(job_def.name), **options}
        )


def job_origin(job: str) -> RemoteJobOrigin:
    """The origin of the job of this name; webserver and daemon find the job by it."""
    location = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name=MODULE), CODE_LOCATION)
    return RemoteRepositoryOrigin(location, SINGLETON_REPOSITORY_NAME).get_job_origin(job)
