"""Metrics from Dagster's records: failed runs by job and fault, daemon heartbeats, and whether a driver runs."""

import time
from collections import Counter
from collections.abc import Iterator

import dagster as dg

from rft_platform.assets.faults import FAULT_TAG, fault_of
from rft_platform.config.home import Home
from rft_platform.jobs.driver_lock import driver_is_running
from rft_platform.metrics.catalogue import Sample


def run_samples(instance: dg.DagsterInstance) -> Iterator[Sample]:
    """Failed runs by job and fault; a run without a recorded fault counts as ``orchestration``."""
    failed = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    counted = Counter((run.job_name, fault_of(run).get(FAULT_TAG, "orchestration")) for run in failed)
    for labels, count in sorted(counted.items()):
        yield Sample("rft_failed_runs_total", count, labels)


def driver_samples(home: Home, instance: dg.DagsterInstance) -> Iterator[Sample]:
    """Whether a driver runs, and the age of each daemon's last heartbeat."""
    yield Sample("rft_driver_running", driver_is_running(home))
    for kind, beat in sorted(instance.get_daemon_heartbeats().items()):
        yield Sample("rft_daemon_heartbeat_age_seconds", max(0.0, time.time() - beat.timestamp), (kind.lower(),))
