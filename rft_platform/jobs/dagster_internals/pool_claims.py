"""Wait for a pool slot: log a message, use no processor time, and end the wait on Ctrl-C or SIGTERM.

Without this module, Dagster's executor repeats its loop without a pause while a step waits for a slot. The executor
captures both signals and handles them only while a step runs.

Upstream: neither the executor's interval nor its handling of signals can be set, and no open issue asks for it.
"""

import logging
import time
from collections.abc import Callable

import dagster as dg
from dagster._utils.concurrency import ConcurrencyClaimStatus
from dagster._utils.interrupts import check_captured_interrupt

from rft_platform.cluster.this_process import is_interrupted
from rft_platform.jobs.dagster_internals.run_workers import is_driven_here

_POLL_S = 0.25
_TURN_S = 2.0  # longest wait of one call; then the executor looks for other steps
_PARTITION_TAG = "dagster/partition"

LOG = logging.getLogger(__name__)

_Claim = Callable[..., ConcurrencyClaimStatus]


def make_claims_interruptible(instance: dg.DagsterInstance) -> None:
    """Replace the instance's method that claims a pool slot by one that waits for the slot."""
    storage, waiting = instance.event_log_storage, set[tuple[str, str]]()
    claim: _Claim = storage.claim_concurrency_slot

    def wait_and_claim(
        concurrency_key: str, run_id: str, step_key: str, priority: int | None = None
    ) -> ConcurrencyClaimStatus:
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
    partition = run.tags.get(_PARTITION_TAG)
    return f"run {run_id[:8]} ({run.job_name}{f' of {partition}' if partition else ''})"
