"""Prometheus collector that reads the store, Dagster's records and the processes at every scrape.

The processes are the engines and the trainer, which are found by their leases, the driver and the daemons. A process
that does not answer in time counts as down.
"""

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rft_platform.assets.run_failure import FAULT_TAG, fault_of
from rft_platform.cluster.interface import Address
from rft_platform.config.home import Home
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.jobs.driver_lock import driver_is_running
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.launches import launches
from rft_platform.online.project import open_project
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.servers.metrics.catalogue import Sample, families
from rft_platform.servers.metrics.round_metrics import RowTotals, outcome_samples, plan_samples
from rft_platform.training.launch import TRAINER
from rft_platform.training.protocol import PREFIX

LOG = logging.getLogger(__name__)
ANSWER_S = 1.0  # time-out of each process's answer
_COUNTERS = ("requests", "prompt_tokens", "completion_tokens", "generate_seconds", "weight_updates")


class ProcessMetrics:
    """Metrics of engines and trainer. Scrapes do not keep an idle engine or trainer alive."""

    def __init__(self) -> None:
        self._http = httpx.Client(timeout=ANSWER_S, trust_env=False)
        weakref.finalize(self, self._http.close)

    def engines(self, home: Home) -> Iterator[Sample]:
        """Counters of each engine replica, of all policies, and the policy version that the replica serves."""
        for name, status in home.cluster.services("engine*", "policy-*").items():
            labels = (name,)
            answer = self._ask(status.address, "/engine/metrics") if status.runs else None
            yield Sample("rft_engine_up", answer is not None, labels)
            if answer is None:
                continue
            counters = answer.json()
            for counter in _COUNTERS:
                if counter in counters:
                    yield Sample(f"rft_engine_{counter}_total", counters[counter], labels)
            if (served := answer.headers.get(VERSION_HEADER, "")).isdigit():
                yield Sample("rft_policy_version_served", int(served), labels)

    def trainer(self, home: Home) -> Iterator[Sample]:
        """Whether the trainer answers, whether it is busy, and its processor time and memory."""
        status = home.cluster.services(TRAINER).get(TRAINER)
        if status is None:
            return
        answer = self._ask(status.address, f"{PREFIX}status") if status.runs else None
        yield Sample("rft_trainer_up", answer is not None)
        if answer is not None:
            figures: dict[str, Any] = answer.json()
            yield Sample("rft_trainer_busy", bool(figures["busy"]))
            yield Sample("rft_trainer_cpu_seconds_total", figures["cpu_seconds"])
            yield Sample("rft_trainer_peak_rss_bytes", figures["peak_rss_mb"] * 2**20)

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
        yield Sample("rft_failed_runs", count, labels)


def driver_samples(home: Home, instance: dg.DagsterInstance) -> Iterator[Sample]:
    """Whether a driver runs, and the age of each daemon's last heartbeat."""
    yield Sample("rft_driver_running", driver_is_running(home))
    for kind, beat in sorted(instance.get_daemon_heartbeats().items()):
        yield Sample("rft_daemon_heartbeat_age_seconds", max(0.0, time.time() - beat.timestamp), (kind.lower(),))


class PlatformCollector(Collector):
    """Collector of the project in ``home``. Scrapes run one at a time; a failing source does not affect the others."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._instance: dg.DagsterInstance | None = None
        self._settings: tuple[int, int] | None = None  # inode and mtime of dagster.yaml when the instance was opened
        self._rows = RowTotals()
        self._processes = ProcessMetrics()

    def collect(self) -> Iterable[Metric]:
        """All families that currently have a value; none before a project has been started."""
        with self._lock:
            samples: list[Sample] = []
            for source, read in self._sources().items():
                started = time.perf_counter()
                samples.extend(_safely(source, read))
                samples.append(Sample("rft_scrape_seconds", time.perf_counter() - started, (source,)))
            return families([*samples, *_lag(samples)])

    def _sources(self) -> dict[str, Callable[[], Iterator[Sample]]]:
        if not self._home.config_file.exists():
            return {}
        return {
            **self._project_sources(),
            "runs": lambda: run_samples(self._dagster()),
            "driver": lambda: driver_samples(self._home, self._dagster()),
            "engine": lambda: self._processes.engines(self._home),
            "trainer": lambda: self._processes.trainer(self._home),
        }

    def _project_sources(self) -> dict[str, Callable[[], Iterator[Sample]]]:
        """What needs the project's configuration; if that cannot be read, the source ``project``, which fails."""
        try:
            project = open_project(self._home)
        except Exception as error:  # of a file that somebody edits: processes and runs are still read
            return {"project": partial(_failing, error)}
        return {
            "plan": lambda: plan_samples(project, launches(self._dagster())),
            "rows": lambda: self._rows.samples(project),
            "outcome": lambda: outcome_samples(project),
        }

    def _dagster(self) -> dg.DagsterInstance:
        """The instance, kept between scrapes; reopened when dagster.yaml was replaced or changed."""
        if self._instance is None or self._settings != _identity(self._home.dagster / "dagster.yaml"):
            if self._instance is not None:
                self._instance.dispose()
            self._instance = open_instance(self._home, capture_output=False)
            self._settings = _identity(self._home.dagster / "dagster.yaml")
        return self._instance


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _lag(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Difference between the newest version of the first policy and that of each of its engines.

    Omitted where version numbers are not comparable: for engines of further policies, and for imported weights.
    """
    known = {(sample.name, *sample.labels): sample.value for sample in samples}
    trained = known.get(("rft_policy_version_trained",))
    for (name, *labels), served in known.items():
        comparable = name == "rft_policy_version_served" and not labels[0].startswith("policy-")
        if comparable and trained is not None and served <= FIRST_IMPORTED:
            yield Sample("rft_policy_version_lag", trained - served, tuple(labels))


def _failing(error: Exception) -> Iterator[Sample]:
    raise error


def _safely(source: str, read: Callable[[], Iterator[Sample]]) -> list[Sample]:
    samples, failed = [], False
    try:
        samples = list(read())
    except Exception as error:  # an incomplete project must not hide the state of its processes
        LOG.warning("metrics of %s cannot be read: %s: %s", source, type(error).__name__, error)
        failed = True
    return [*samples, Sample("rft_scrape_failed", failed, (source,))]
