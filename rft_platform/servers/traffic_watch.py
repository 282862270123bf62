"""One thread that computes figures of production traffic for ``/metrics`` and the status page, and alerts on them.

Requests read the newest figures and never wait for the database. While a limit is exceeded, the status page shows a
warning. The log and the events record once when this begins and once when it ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

from sqlalchemy import Engine

from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published
from rft_platform.rounds.releases.servable_versions import round_rule
from rft_platform.rounds.releases.training_start import newest_refused
from rft_platform.serving.pages.routes import Watch
from rft_platform.serving.reports.traffic_figures import traffic_figures
from rft_platform.serving.rules.alerts import ALERT, ALERT_ENDED, Limits, TrafficFigures, alerts_of
from rft_platform.serving.traffic import TrafficStore

LOG = logging.getLogger(__name__)
_INTERVAL_S = 20.0
_ROUNDS = 100  # newest rounds whose versions are looked up


class TrafficWatch:
    """Computes the figures of a project's traffic at intervals; any thread may read the newest ones."""

    def __init__(
        self, project: Project, database: Engine, store: TrafficStore, clock: Callable[[], float] = time.time
    ) -> None:
        self._project = project
        self._database = database
        self._store = store
        self._clock = clock
        self._newest = Watch()
        self._open: set[str] | None = None  # alerts that the database has as begun; None: not read yet
        self._window_s = project.config.service.alerts.window_s
        self._limits = Limits(**project.config.service.alerts.model_dump(exclude={"window_s"}))

    def __call__(self) -> Watch:
        """The newest figures for the status page."""
        return self._newest

    def metrics(self) -> dict[str, float]:
        """The newest figures for ``/metrics``."""
        watch = self._newest
        return {
            "rows_above_share": watch.rows_above_share,
            "alerts": len(watch.alerts),
            **_metrics_of(watch.figures),
        }

    def update(self) -> None:
        """Compute the figures, and report limits that are exceeded now or no longer."""
        figures = traffic_figures(self._database, self._clock() - self._window_s, self._versions())
        watch = Watch(
            rows_above_share=len(self._store.next_choice(round_rule(self._project)).above_share),
            figures=figures,
            alerts=alerts_of(figures, self._limits, len(newest_refused(self._project))),
        )
        self._newest = watch
        if self._open is None:  # alerts that an earlier process of the service has recorded
            self._open = set(self._store.open_alerts())
        for name in sorted(watch.alerts.keys() - self._open):
            LOG.warning("alert: %s (service.alerts.%s)", watch.alerts[name], name)
            self._store.log(ALERT, watch.alerts[name], limit=name)
            self._open.add(name)
        for name in sorted(self._open - watch.alerts.keys()):
            LOG.info("the alert service.alerts.%s has ended", name)
            self._store.log(ALERT_ENDED, f"service.alerts.{name} is kept again", limit=name)
            self._open.remove(name)

    def run(self, stop: threading.Event) -> None:
        """Update the figures until ``stop`` is set; after an error the old figures stay."""
        while True:
            try:
                self.update()
            except Exception as error:
                LOG.warning("the figures of production traffic cannot be computed and will be retried: %s", error)
            if stop.wait(_INTERVAL_S):
                return

    def _versions(self) -> Mapping[int, int]:
        """The policy versions that the newest rounds have trained.

        A round that trained nothing is left out: it published the same version as the round before.
        """
        store = self._project.store
        policies = {number: published(store, number) for number in sorted(store.rounds())[-_ROUNDS - 1 :]}
        versions = [(number, policy.policy_version) for number, policy in policies.items() if policy is not None]
        return {number: version for (_, before), (number, version) in pairwise(versions) if version != before}


def _metrics_of(figures: TrafficFigures) -> dict[str, float]:
    """The figures that have a value, by name."""
    found: dict[str, float | None] = {"recent_calls": figures.calls, "recent_label_rate": figures.label_rate}
    for action, each in figures.actions.items():
        found[f"recent_calls_{action}"] = each.calls
        found[f"recent_reward_{action}"] = each.mean_reward
    for name, delay in (("label", figures.label_delay_s), ("served", figures.served_delay_s)):
        if delay is not None:
            found |= {f"recent_{name}_delay_p50_s": delay[0], f"recent_{name}_delay_p95_s": delay[1]}
    return {name: value for name, value in found.items() if value is not None}
