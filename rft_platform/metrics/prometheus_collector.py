"""Prometheus collector that reads the store, Dagster's records and the processes at every scrape."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import dagster as dg
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.launches import launches
from rft_platform.metrics.catalogue import Sample, families
from rft_platform.metrics.process_metrics import ProcessMetrics, driver_samples, run_samples
from rft_platform.metrics.round_metrics import RowTotals, outcome_samples, plan_samples
from rft_platform.rounds.project.project import Project
from rft_platform.serving.database import FIRST_IMPORTED

LOG = logging.getLogger(__name__)


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
        try:
            project = Project.open(self._home)
        except UserError:
            return {}
        return {
            "plan": lambda: plan_samples(project, launches(self._dagster())),
            "rows": lambda: self._rows.samples(project),
            "outcome": lambda: outcome_samples(project),
            "runs": lambda: run_samples(self._dagster()),
            "driver": lambda: driver_samples(self._home, self._dagster()),
            "engine": lambda: self._processes.engines(self._home),
            "trainer": lambda: self._processes.trainer(self._home),
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
    """Difference between the newest policy version and each engine's version.

    Omitted for an engine that serves imported weights: their version numbers are not comparable.
    """
    known = {(sample.name, *sample.labels): sample.value for sample in samples}
    trained = known.get(("rft_policy_version_trained",))
    for (name, *labels), served in known.items():
        if name == "rft_policy_version_served" and trained is not None and served <= FIRST_IMPORTED:
            yield Sample("rft_policy_version_lag", trained - served, tuple(labels))


def _safely(source: str, read: Callable[[], Iterator[Sample]]) -> list[Sample]:
    samples, failed = [], False
    try:
        samples = list(read())
    except Exception as error:  # an incomplete project must not hide the state of its processes
        LOG.warning("metrics of %s cannot be read: %s: %s", source, type(error).__name__, error)
        failed = True
    return [*samples, Sample("rft_scrape_failed", failed, (source,))]
