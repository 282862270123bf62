"""Keep MLflow's alias ``serving`` on the version that answers production traffic.

``champion`` is the best version by its evaluation. Another version may serve: a roll-back, a canary, an A/B test or a
promotion by hand decides. These decisions are made by commands, over HTTP and by the service, also on a host without
MLflow; so the process of ``rft serve`` that trains reads the newest decision from the database.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rft_platform.online.releases.versions import MODEL as IMPORTED
from rft_platform.online.releases.versions import imported_policies, policy_of_version, release_commands
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import connect_registry

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry

LOG = logging.getLogger(__name__)
_STEP_S = 2.0


class ServingAlias:
    """Sets the alias when another version serves."""

    def __init__(self, project: Project, connect: "Callable[[Project], ModelRegistry]" = connect_registry) -> None:
        self._project = project
        self._connect = connect
        self._named: tuple[int, str | None] | None = None  # policy version and model version of the last alias

    def step(self) -> None:
        """Set the alias if another version serves than at the last call. MLflow is imported by the first one."""
        number = release_commands(self._project).status()["serving"]
        policy = None if number is None else policy_of_version(self._project, number)
        serving = None if policy is None else (policy.policy_version, policy.model_version)
        if policy is None or serving == self._named:
            return
        registry, imported = self._connect(self._project), policy.policy_version > FIRST_IMPORTED
        version = None if policy.model_version is None else int(policy.model_version)
        registry.set_serving(None if imported else version)
        if imported_policies(self._project):  # otherwise MLflow has no model of imported versions
            registry.of_policy(IMPORTED).set_serving(version if imported else None)
        self._named = serving

    def run(self, stop: threading.Event) -> None:
        """Repeat ``step`` until ``stop`` is set; a failure is logged and tried again."""
        wait = _STEP_S
        while not stop.wait(wait):
            try:
                self.step()
                wait = _STEP_S
            except Exception as error:
                wait = min(2 * wait, 60.0)
                LOG.warning("MLflow's alias `serving` cannot be set and will be retried: %s", error)


@contextmanager
def naming_the_serving_version(project: Project) -> Iterator[None]:
    """Keep the alias up to date in a thread during the block."""
    stop = threading.Event()
    thread = threading.Thread(target=ServingAlias(project).run, args=(stop,), name="serving-alias", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_STEP_S)
