"""Read a project's progress from its files, many times a second, without disturbing its processes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.process_table import processes_with_role
from chaos.schedule import Point
from rft_platform.cluster.local.leases import read_lease
from rft_platform.common.files import is_temporary
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key, round_number

POLL_S = 0.002
CANCELLED = threading.Event()  # set when a campaign is interrupted: every thread then ends its project

#: The phases of a round, in order; each note ends the phase before it.
_PHASES = ("rollouts", "judging", "training", "evaluation", "between")
_BEGUN_BY = {
    "explore.json": "judging",
    "judge.json": "training",
    "policy-policy.json": "evaluation",
    "evaluation.json": "between",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """A project's progress: its newest round, and the phase of that round."""

    round: int  # -1: no round has started
    phase: str  # one of ``_PHASES``; before round 1 "start" and "warm start"

    @property
    def position(self) -> int:
        """Progress as a number that increases from phase to phase."""
        return self.round * len(_PHASES) + (_PHASES.index(self.phase) if self.phase in _PHASES else 0)

    @property
    def half(self) -> tuple[int, bool]:
        """The round, and whether its second job (training and evaluation) is running."""
        return self.round, self.phase in ("training", "evaluation")


def current_progress(home: Home) -> Progress:
    """The newest round and its phase, derived from the existing notes."""
    newest = max((name for name in _names(home.rounds) if name.startswith("r")), default=None)
    if newest is None:
        return Progress(-1, "start")
    number, notes = round_number(newest), set(_names(home.rounds / newest))
    begun = [phase for note, phase in _BEGUN_BY.items() if note in notes]
    if number == 0:
        return Progress(0, "between" if "evaluation.json" in notes else "warm start")
    return Progress(number, begun[-1] if begun else "rollouts")


class PointWatch:
    """Detects when a project enters a phase or point after the watch was created."""

    def __init__(self, home: Home, checkpoints: Path, point: Point) -> None:
        self._home, self._checkpoints, self._point = home, checkpoints, point
        phase = {"rows": "judging", "checkpoint": "evaluation", "published": "evaluation"}.get(point, point)
        began = current_progress(home).position
        self._target = next(
            (position for position in range(began + 1, began + 2 + len(_PHASES)) if _phase_at(position) == phase), began
        )

    def reached(self) -> bool:
        """Whether the point was reached. A point that was too short to be observed counts once it has passed."""
        if self._point == "starting":
            return _starting(self._home)
        progress = current_progress(self._home)
        if self._point == "rows" and progress.phase == "rollouts":
            return _writing(self._home.rounds / round_key(progress.round) / "rollouts")
        if self._point == "checkpoint" and _writing(self._checkpoints):
            return True
        return progress.position >= self._target


def _phase_at(position: int) -> str:
    return _PHASES[position % len(_PHASES)]


def wait_for(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Poll ``condition``; True if it held within ``timeout_s``. Raises KeyboardInterrupt after ``CANCELLED`` is set."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if CANCELLED.is_set():
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def progress_mark(home: Home) -> tuple[int, int]:
    """A pair that increases with every note: the newest round, and its number of notes."""
    progress = current_progress(home)
    if progress.round < 0:
        return -1, 0
    folder = home.rounds / round_key(progress.round)
    return progress.round, sum(name.endswith(".json") and not name.startswith(".") for name in _names(folder))


def _starting(home: Home) -> bool:
    """Whether an engine or a trainer runs that has not published its lease yet."""
    leases = [read_lease(home.leases / name) for name in _names(home.leases) if name.endswith(".json")]
    pids = {lease.pid for lease in leases if lease is not None}
    return any(member.pid not in pids for role in ("engine", "trainer") for member in processes_with_role(home, role))


def _writing(folder: Path) -> bool:
    return any(map(is_temporary, _names(folder)))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
