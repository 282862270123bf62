"""Metrics of processes and of Dagster's failed runs.

The processes are the engines and the trainer, which are found by their leases, the driver and the daemons.

A process that does not answer in time counts as down.
"""

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dagster as dg
import httpx

from rft_platform.assets.run_failure import FAULT_TAG, fault_of
from rft_platform.cluster.interface import Address
from rft_platform.config.home import Home
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.jobs.driver_lock import driver_is_running
from rft_platform.metrics.catalogue import Sample
from rft_platform.training.launch import TRAINER
from rft_platform.training.protocol import PREFIX

ANSWER_S = 1.0  # time-out of each process's answer
_COUNTERS = ("requests", "prompt_tokens", "completion_tokens", "generate_seconds", "weight_updates")


class ProcessMetrics:
    """Metrics of engines and trainer. Scrapes do not keep an idle engine or trainer alive."""

    def __init__(self) -> None:
        self._http = httpx.Client(timeout=ANSWER_S, trust_env=False)
        weakref.finalize(self, self._http.close)

    def engines(self, home: Home) -> Iterator[Sample]:
        """Counters of each engine replica, of all policies, and the policy version that the replica serves."""
        for name, lease in home.cluster.leases("engine*", "policy-*").items():
            labels = (name,)
            answer = self._ask(lease.address(name), "/engine/metrics") if lease.alive else None
            yield Sample("rft_engine_up", answer is not None, labels)
            if answer is None:
                continue
            counters = answer.json()
            for name in _COUNTERS:
                if name in counters:
                    yield Sample(f"rft_engine_{name}_total", counters[name], labels)
            if (served := answer.headers.get(VERSION_HEADER, "")).isdigit():
                yield Sample("rft_policy_version_served", int(served), labels)

    def trainer(self, home: Home) -> Iterator[Sample]:
        """Whether the trainer answers, whether it is busy, and its processor time and memory."""
        lease = home.cluster.leases(TRAINER).get(TRAINER)
        if lease is None:
            return
        answer = self._ask(lease.address(TRAINER), f"{PREFIX}status") if lease.alive else None
        yield Sample("rft_trainer_up", answer is not None)
        if answer is not None:
            status: dict[str, Any] = answer.json()
            yield Sample("rft_trainer_busy", bool(status["busy"]))
            yield Sample("rft_trainer_cpu_seconds_total", status["cpu_seconds"])
            yield Sample("rft_trainer_peak_rss_bytes", status["peak_rss_mb"] * 2**20)

    def _ask(self, address: Address, path: str) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {address.token}"}
        try:
            answer = self._http.post(f"{address.url}{path}", json={}, headers=headers)
        except httpx.HTTPError:
            return None
        return answer if answer.is_success else None


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
