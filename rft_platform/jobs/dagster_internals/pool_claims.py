"""Wait for a pool slot without using a processor, with a message, and so that Ctrl-C and SIGTERM end the wait.

Dagster's executor captures both signals and looks at them only while a step runs, and it repeats its loop without a
pause while a step waits for a slot.
"""

import logging
import time
from collections.abc import Callable

import dagster as dg
from dagster._utils.concurrency import ConcurrencyClaimStatus
from dagster._utils.interrupts import check_captured_interrupt

_POLL_S = 0.25
_TURN_S = 2.0  # time for one call: then the executor looks for other steps
_PARTITION_TAG = "dagster/partition"

LOG = logging.getLogger(__name__)

_Claim = Callable[..., ConcurrencyClaimStatus]


class PoolWaitInterrupted(dg.DagsterExecutionInterruptedError):
    """The command was interrupted while a step waited for a pool slot: that step has not begun."""


def make_claims_interruptible(instance: dg.DagsterInstance) -> None:
    """Replace the instance's claim of a pool slot by one that waits for it."""
    storage, waiting = instance.event_log_storage, set[tuple[str, str]]()
    claim: _Claim = storage.claim_concurrency_slot

    def wait_and_claim(
        concurrency_key: str, run_id: str, step_key: str, priority: int | None = None
    ) -> ConcurrencyClaimStatus:
        until = time.monotonic() + _TURN_S
        while not (status := claim(concurrency_key, run_id, step_key, priority)).is_claimed:
            if check_captured_interrupt():
                raise PoolWaitInterrupted(f"interrupted while {step_key} waited for the pool {concurrency_key}")
            if time.monotonic() > until:
                if (run_id, step_key) not in waiting:
                    waiting.add((run_id, step_key))
                    LOG.warning("%s waits: %s", step_key, _holders(instance, concurrency_key))
                return status.with_sleep_interval(0.0)
            time.sleep(_POLL_S)
        return status

    setattr(storage, claim.__name__, wait_and_claim)


def _holders(instance: dg.DagsterInstance, pool: str) -> str:
    """Which runs have the slots of the pool."""
    held = instance.event_log_storage.get_concurrency_info(pool).claimed_slots
    names = [_name(instance, slot.run_id) for slot in held]
    return f"the pool {pool} is taken by {', '.join(names) or 'a launch that begins'}"


def _name(instance: dg.DagsterInstance, run_id: str) -> str:
    run = instance.get_run_by_id(run_id)
    if run is None:
        return f"run {run_id[:8]}"
    partition = run.tags.get(_PARTITION_TAG)
    return f"run {run_id[:8]} ({run.job_name}{f' of {partition}' if partition else ''})"
