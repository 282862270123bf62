"""Dagster's instance: it masks secrets in everything it stores, and its waits for pool slots can be interrupted.

``dagster.yaml`` names this class, so every process of Dagster uses it: webserver, daemon, code servers, run workers.
Processes that execute runs themselves use ``DriverInstance``.

While a step waits for a pool slot, Dagster's executor repeats its loop without a pause, and it handles signals only
while a step runs. ``make_claims_interruptible`` makes the wait log a message, use no processor time, and end on Ctrl-C
or SIGTERM.

Upstream: Dagster masks nothing that it stores and has no hook before an event is stored (a closed request is
https://github.com/dagster-io/dagster/issues/681). ``python_logs`` sees log lines, but not stack traces, metadata, tags
and ticks. The overridden methods are public names of ``DagsterInstance``; only the types are private. Neither the
executor's interval nor its handling of signals can be set. ``execute_in_process`` does not record the origin of its job
(/issues/19458, /issues/17707); there is no public query for the results of a check by partition (/issues/17005).
``DagsterInstance.from_config`` loads a folder's instance, but takes no overrides. The error of a failed blocking check
and the file of a run's event log are not exported.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from dagster._core.scheduler.instigation import InstigatorTick
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecord
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._serdes import deserialize_value, serialize_value
from dagster._utils.concurrency import ConcurrencyClaimStatus
from dagster._utils.interrupts import check_captured_interrupt

from rft_platform.cluster.this_process import is_interrupted
from rft_platform.common.redaction import redact, secret_masker
from rft_platform.config.home import PRIVATE_UMASK
from rft_platform.jobs.dagster_internals.kept_connections import keep_connections
from rft_platform.jobs.dagster_internals.run_launcher import is_driven_here
from rft_platform.observability.masked_output import mask_output
from rft_platform.resources.names import PARTITION_TAG

_POLL_S = 0.25
_TURN_S = 2.0  # longest wait of one call; then the executor looks for other steps

LOG = logging.getLogger(__name__)

_Claim = Callable[..., ConcurrencyClaimStatus]


def make_claims_interruptible(instance: dg.DagsterInstance) -> None:
    """Replace the instance's method that claims a pool slot by one that waits for the slot."""
    storage, waiting = instance.event_log_storage, set[tuple[str, str]]()
    claim: _Claim = storage.claim_concurrency_slot

    def wait_and_claim(
        concurrency_key: str, run_id: str, step_key: str, priority: int | None = None
    ) -> ConcurrencyClaimStatus:
        """Claim a slot of a pool; wait up to ``_TURN_S`` seconds, and stop waiting on an interruption."""
        until = time.monotonic() + _TURN_S
        while not (status := claim(concurrency_key, run_id, step_key, priority)).is_claimed:
            if check_captured_interrupt() or is_interrupted():
                waited_for = f"interrupted while {step_key} waited for the pool {concurrency_key}"
                raise dg.DagsterExecutionInterruptedError(waited_for)
            if time.monotonic() > until:
                if (run_id, step_key) not in waiting:
                    waiting.add((run_id, step_key))
                    _log_wait(instance, step_key, concurrency_key)
                return status.with_sleep_interval(0.0)
            time.sleep(_POLL_S)
        return status

    setattr(storage, claim.__name__, wait_and_claim)


def _log_wait(instance: dg.DagsterInstance, step_key: str, pool: str) -> None:
    """Log which runs have the slots of the pool; log nothing if this process runs them, because the wait is planned."""
    slots = instance.event_log_storage.get_concurrency_info(pool).claimed_slots
    held = {slot.run_id: instance.get_run_by_id(slot.run_id) for slot in slots}
    if held and all(run is not None and is_driven_here(run) for run in held.values()):
        return
    names = ", ".join(_name(run_id, run) for run_id, run in held.items()) or "a launch that begins"
    LOG.warning("%s waits: the pool %s is taken by %s", step_key, pool, names)


def _name(run_id: str, run: dg.DagsterRun | None) -> str:
    if run is None:
        return f"run {run_id[:8]}"
    partition = run.tags.get(PARTITION_TAG)
    return f"run {run_id[:8]} ({run.job_name}{f' of {partition}' if partition else ''})"


Stored = TypeVar("Stored", bound=Any)


class MaskedInstance(dg.DagsterInstance):
    """Masks events (messages, stack traces, causes, metadata), run tags and sensor ticks before they are stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_claims_interruptible(self)
        # Dagster's own programs do not run the platform's start-up code, which masks their output. Dagster captures
        # this output into files below the home.
        mask_output()
        os.umask(PRIVATE_UMASK)

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        """No settings beyond Dagster's own."""
        return {}

    @classmethod
    def config_defaults(cls, base_dir: str) -> Any:
        """Dagster's own storages and launchers below ``base_dir``."""
        return InstanceRef.config_defaults(base_dir)

    def handle_new_event(self, event: dg.EventLogEntry, **options: Any) -> None:
        """Store the event, masked, and pass it to its subscribers."""
        super().handle_new_event(without_secrets(event), **options)

    def store_event(self, event: dg.EventLogEntry) -> None:
        """Store the event, masked."""
        super().store_event(without_secrets(event))

    def add_run_tags(self, run_id: str, new_tags: Mapping[str, str]) -> None:
        """Add the tags, masked."""
        super().add_run_tags(run_id, {name: redact(value) for name, value in new_tags.items()})

    def update_tick(self, tick: InstigatorTick) -> Any:
        """Store the outcome of a sensor's or schedule's evaluation, masked."""
        return super().update_tick(tick._replace(tick_data=without_secrets(tick.tick_data)))


def without_secrets(stored: Stored) -> Stored:
    """A copy of a Dagster record with the secrets in its texts masked; the record itself if it contains none."""
    content, mask = json.loads(serialize_value(stored)), secret_masker()
    together = "\n".join(_texts(content))  # one call for all texts: a match in one of them is a match in all
    if mask(together) == together:
        return stored
    return deserialize_value(json.dumps(_masked(content, mask)), type(stored))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list):
        return [_masked(item, mask) for item in value]
    if isinstance(value, dict):
        return {key: _masked(item, mask) for key, item in value.items()}
    return value


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
