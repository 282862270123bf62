"""Figures of production traffic for ``/metrics`` and the status page, computed by a thread of the service.

Requests read the newest figures and never wait for the database.
"""

import logging
import threading

from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.servable_versions import round_rule
from rft_platform.serving.pages.routes import Watch
from rft_platform.serving.traffic import TrafficStore

LOG = logging.getLogger(__name__)
_INTERVAL_S = 15.0


class TrafficWatch:
    """Computes the figures of a project's traffic at intervals; any thread may read the newest ones."""

    def __init__(self, project: Project, store: TrafficStore) -> None:
        self._project = project
        self._store = store
        self._newest = Watch()

    def __call__(self) -> Watch:
        """The newest figures for the status page."""
        return self._newest

    def figures(self) -> dict[str, float]:
        """The newest figures for ``/metrics``."""
        return {"rows_above_subject_share": self._newest.rows_above_share}

    def update(self) -> None:
        """Compute the figures."""
        self._newest = Watch(rows_above_share=self._store.rows_above_share(round_rule(self._project)))

    def run(self, stop: threading.Event) -> None:
        """Update the figures until ``stop`` is set; after an error the old ones stay."""
        while True:
            try:
                self.update()
            except Exception as error:
                LOG.warning("the figures of production traffic cannot be computed and will be retried: %s", error)
            if stop.wait(_INTERVAL_S):
                return
