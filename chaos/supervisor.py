"""Supervisor of a chaos campaign: restarts ended processes, raises the budget, measures recovery times."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from chaos.injector import InjectionResult
from chaos.io_faults import IoFaults
from chaos.process_table import processes_with_role
from chaos.progress_probe import current_progress, progress_mark
from chaos.records import Ended, Injection
from chaos.schedule import Kill, Mode
from rft_platform.common.errors import RftError
from rft_platform.config.home import Home

MAINTAIN_S = 0.1
_NOT_NEEDED_BY_ROUNDS = (
    "webserver",
    "mlflow",
)  # rounds may continue without them: they have recovered when they answer


class ProjectRunner(Protocol):
    """A way to run a project: by `rft run`, here or on Ray, or by webserver, daemon and MLflow server."""

    mode: Mode
    home: Home
    ended: list[Ended]  # processes that ended by themselves, with their output
    expected: set[int]  # process ids of victims, whose end is not reported

    def start(self, rounds: int) -> None:
        """Start the project with a budget of ``rounds``, or raise its budget."""

    def maintain(self) -> None:
        """Restart ended processes; called several times a second."""

    def finished(self) -> bool:
        """Whether every round of the budget is done."""

    def inject(self, kill: Kill, timeout_s: float) -> InjectionResult:
        """Perform a kill, for whose victim it waits at most ``timeout_s``."""

    def facts(self) -> dict[str, float]:
        """Measurements of its own for the report."""

    def io_faults(self) -> IoFaults | None:
        """The file system faults injected into its processes, if any."""

    def serves(self, role: str) -> bool:
        """Whether the process of this role works again; True for processes that others start."""

    def stop(self) -> None:
        """End the processes that it started, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs of the harness, in seconds, and the number of rounds by which a budget grows."""

    moment_s: float  # until the planned moment of a kill
    victim_s: float  # until a process of the target's role runs
    recovery_s: float  # until the project makes progress
    end_s: float  # until the undisturbed end
    more_rounds: int  # at the start, and whenever a project would end before its kills
    fault_s: float = 240.0  # until the next file system fault strikes
    quiet_rounds: int = 1  # rounds started and finished undisturbed after the last kill


LIMITS: dict[Mode, Limits] = {
    "driver": Limits(moment_s=20.0, victim_s=15.0, recovery_s=120.0, end_s=300.0, more_rounds=4),
    "daemon": Limits(moment_s=25.0, victim_s=45.0, recovery_s=240.0, end_s=600.0, more_rounds=2),
    "ray": Limits(moment_s=90.0, victim_s=60.0, recovery_s=180.0, end_s=300.0, more_rounds=4, quiet_rounds=2),
}


@contextmanager
def ending_servers(home: Home) -> Iterator[None]:
    """After the block, end the home's engine and trainer as `rft stop` does."""
    try:
        yield
    finally:
        home.cluster.stop_all()


class Supervisor:
    """A thread that restarts ended processes, raises the budget, and records the recovery time of each kill."""

    def __init__(self, runner: ProjectRunner) -> None:
        self.more_rounds = LIMITS[runner.mode].more_rounds
        self.rounds = self.more_rounds
        self.budgets = [self.rounds]
        self.error: Exception | None = None
        self._runner = runner
        self._waiting: list[tuple[Injection, float, tuple[int, int], frozenset[int]]] = []
        self._extends_budget = True
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Supervisor":
        try:
            self._runner.start(self.rounds)
        except BaseException:
            self._runner.stop()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._runner.stop()

    def watch(self, injection: Injection, mark: tuple[int, int], before: frozenset[int]) -> None:
        """Measure the recovery time of a kill that was just performed.

        ``mark``: the progress before the kill. ``before``: the process ids that its target's role had.
        """
        with self._lock:
            self._waiting.append((injection, time.monotonic(), mark, before))

    def recovered(self) -> bool:
        """Whether the project has recovered from every kill; raises RftError if the thread has failed."""
        if self.error is not None:
            raise RftError(f"the harness itself failed: {self.error!r}") from self.error
        with self._lock:
            return not self._waiting

    def abandon(self) -> list[Injection]:
        """Stop waiting for the outstanding recoveries; returns their kills."""
        with self._lock:
            given_up, self._waiting = [injection for injection, *_ in self._waiting], []
        return given_up

    def stop_extending(self) -> int:
        """Fix the budget at some quiet rounds beyond the current round, or more if it was higher; returns it."""
        with self._lock:
            self._extends_budget = False
            quiet = LIMITS[self._runner.mode].quiet_rounds
            self.rounds = max(self.rounds, current_progress(self._runner.home).round + quiet)
            self._start_with_budget()
        return self.rounds

    def _start_with_budget(self) -> None:
        self.budgets.append(self.rounds)
        self._runner.start(self.rounds)

    def _run(self) -> None:
        while not self._stop.wait(MAINTAIN_S):
            with self._lock:
                try:
                    self._runner.maintain()
                    if self._extends_budget and self._runner.finished():
                        self.rounds += self.more_rounds
                        self._start_with_budget()
                    self._waiting = [entry for entry in self._waiting if not self._recovered(*entry)]
                except Exception as error:  # raised by ``recovered``, in the harness's own thread
                    self.error = error
                    return

    def _recovered(self, injection: Injection, at: float, mark: tuple[int, int], before: frozenset[int]) -> bool:
        home, role = self._runner.home, injection.kill.target
        if role not in _NOT_NEEDED_BY_ROUNDS and progress_mark(home) <= mark:
            return False
        if before and not any(successor.pid not in before for successor in processes_with_role(home, role)):
            return False
        if not self._runner.serves(role):
            return False
        injection.recovery_s = round(time.monotonic() - at, 2)
        return True
