"""Run one project of a chaos campaign: perform the scheduled kills, then let the project finish undisturbed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chaos.injector import wait_for_moment
from chaos.invariants.checks import check_open, check_stopped
from chaos.progress_probe import CANCELLED, current_progress, progress_mark, wait_for
from chaos.records import Injection, Outcome, Violation
from chaos.schedule import Kill
from chaos.scratch import Scratch
from chaos.supervisor import LIMITS, MAINTAIN_S, Limits, ProjectRunner, Supervisor, ending_servers

_POLL_FAULTS_S = 0.5  # interval at which the faults are counted
_HITS_PER_PHASE = 3  # as often as the plan retries a phase


def run_project(
    runner: ProjectRunner,
    scratch: Scratch,
    kills: Sequence[Kill],
    seed: int,
    targets: Sequence[str],
    log: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Kill as scheduled, let the project finish, and end its processes; returns a record of what happened.

    ``invariants.check_project`` checks afterwards whether rows, checkpoints, MLflow and Dagster are sound.
    """
    began, home = time.monotonic(), runner.home
    with ending_servers(home), Supervisor(runner) as supervisor:
        sequence = _KillSequence(runner, scratch, supervisor, seed, tuple(targets), LIMITS[runner.mode], began, log)
        for kill in kills:
            sequence.perform(kill)
        sequence.wait_for_faults()
        sequence.finish()
        faults = runner.io_faults()
        sequence.injections += faults.records() if faults is not None else []
        outcome = Outcome(
            runner.mode,
            seed,
            tuple(targets),
            supervisor.rounds,
            sequence.injections,
            runner.ended,
            0.0,
            sequence.violations,
            facts=runner.facts(),
            budgets=tuple(supervisor.budgets),
        )
        check_open(home, outcome)
    check_stopped(home, outcome)
    outcome.wall_s = time.monotonic() - began
    return outcome


@dataclass(slots=True)
class _KillSequence:
    """Performs the kills of one project and records them."""

    runner: ProjectRunner
    scratch: Scratch
    supervisor: Supervisor
    seed: int
    targets: tuple[str, ...]
    limits: Limits
    began: float
    log: Callable[[str], None]
    injections: list[Injection] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    _hits: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def perform(self, kill: Kill) -> None:
        """Wait for the previous recovery (unless ``kill.hurry``) and for the planned moment, then kill."""
        if not kill.hurry:
            self._recover()
        home = self.runner.home
        on_time = wait_for_moment(home, self.scratch.checkpoints(home), kill, self.limits.moment_s)
        self._wait_until_retries_remain()
        mark = progress_mark(home)
        result = self.runner.inject(kill, self.limits.victim_s)
        injection = Injection(
            kill=kill,
            mode=self.runner.mode,
            victim=f"no {kill.target} was running" if result.victim is None else str(result.victim),
            round=result.progress.round,
            phase=result.progress.phase,
            on_time=on_time,
            at=round(time.monotonic() - self.began, 2),
            hit=result.victim is not None,
        )
        self.injections.append(injection)
        if injection.hit:
            self._hits[result.progress.half] += 1
            self.supervisor.watch(injection, result.mark or mark, result.before)
        self.log(_line(injection))

    def wait_for_faults(self) -> None:
        """Let the project run until every file system fault has occurred, or counts as missed after several starts."""
        faults = self.runner.io_faults()
        if faults is None:
            return
        left, changed_at = faults.left(), time.monotonic()
        while left and time.monotonic() - changed_at < self.limits.fault_s:
            self.supervisor.recovered()  # raises errors of the harness
            if CANCELLED.wait(_POLL_FAULTS_S):
                raise KeyboardInterrupt
            if faults.left() != left:
                left, changed_at = faults.left(), time.monotonic()
                self.log(f"{time.monotonic() - self.began:7.1f} s  {left} file system faults left")

    def _faults_left(self) -> int:
        faults = self.runner.io_faults()
        return 0 if faults is None else faults.left()

    def finish(self) -> None:
        """Let the project run to its end undisturbed."""
        self._recover()
        rounds = self.supervisor.stop_extending()
        if not wait_for(self.runner.finished, self.limits.end_s, MAINTAIN_S):
            progress = current_progress(self.runner.home)
            self._report(
                "the project ends",
                f"only some of {rounds} rounds were done {self.limits.end_s:.0f} s after the last kill: round "
                f"{progress.round} is at {progress.phase}",
            )

    def _wait_until_retries_remain(self) -> None:
        """Wait while the current phase has been hit as often as it is retried: another hit would require a person."""
        wait_for(lambda: self._hits[current_progress(self.runner.home).half] < _HITS_PER_PHASE, self.limits.recovery_s)

    def _recover(self) -> None:
        left = self._faults_left()
        while not wait_for(self.supervisor.recovered, self.limits.recovery_s, MAINTAIN_S):
            before, left = left, self._faults_left()
            if left == before:
                break  # else a fault has struck meanwhile: the wait starts again
        else:
            return
        progress = current_progress(self.runner.home)
        for injection in self.supervisor.abandon():
            self._report(
                "every kill is recovered from",
                f"no progress for {self.limits.recovery_s:.0f} s after kill {injection.kill.number} "
                f"({injection.victim}); round {progress.round} is at {progress.phase}",
                injection.kill.number,
            )

    def _report(self, invariant: str, message: str, number: int | None = None) -> None:
        last = [number] if number is not None else [injection.kill.number for injection in self.injections[-1:]]
        self.violations.append(Violation(invariant, message, self.runner.mode, self.seed, tuple(last), self.targets))


def _line(injection: Injection) -> str:
    kill = injection.kill
    where = f"r{max(injection.round, 0):04d} {injection.phase}"
    what = kill.target if injection.hit else injection.victim
    return f"{injection.at:7.1f} s  kill {kill.number:3d}  {what} ({kill.how}) at {where}, planned for {kill.point}"
