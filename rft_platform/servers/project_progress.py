"""The state of a project's training for the status page, computed at most every few seconds."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rft_platform.cluster.local.supervisor import failing_servers
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import read
from rft_platform.rounds.releases.training_start import describe_start
from rft_platform.servers.next_launches import what_is_next
from rft_platform.serving.pages.routes import Progress

LOG = logging.getLogger(__name__)
_FRESH_S = 3.0


class ProjectProgress:
    """Computes the progress of a project; several threads may call it."""

    def __init__(self, project: Project, problems: Callable[[], Sequence[str | None]] = tuple) -> None:
        """``problems``: of the service's own threads; None for a thread without one."""
        self._project = project
        self._own_problems = problems
        self._lock = threading.Lock()
        self._found: tuple[float, Progress] | None = None

    def __call__(self) -> Progress:
        """The progress, a few seconds old at most."""
        with self._lock:
            if self._found is None or time.monotonic() - self._found[0] > _FRESH_S:
                self._found = (time.monotonic(), self._compute())
            return replace(self._found[1], problems=tuple(self.problems()))

    def problems(self) -> list[str]:
        """Why a server of the project or the engine does not run, or new versions cannot be read."""
        return [*filter(None, self._own_problems()), *failing_servers(self._project.home.logs)]

    def _compute(self) -> Progress:
        if self._project.config.mode == "serve":
            return Progress(last_round(self._project), ("this process serves; the training runs in mode train",))
        try:
            lines = tuple(what_is_next(self._project).split("; "))
        except Exception as error:
            LOG.warning("the plan of the project cannot be read: %s", error)
            lines = (f"the plan cannot be read: {error}",)
        return Progress(last_round(self._project), lines)


def last_round(project: Project) -> str:
    """The newest trained round in one line."""
    for number in sorted(project.store.rounds(), reverse=True):
        record = read(project.store, number)
        policy = record.published()
        if number == 0 or policy is None:
            continue
        reward = record.judged.mean_reward if record.judged else None
        said = "" if reward is None else f", mean reward {reward:.3f}"
        started = describe_start(project.store, number)
        said += f", {started}" if started else ""
        return f"Last round: {round_key(number)} published version {policy.policy_version}{said}."
    return "No round has ended yet."
