"""Run one project of a chaos campaign: perform the scheduled kills, then let the project finish undisturbed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rft_platform.chaos.invariants import check_open, check_stopped
from rft_platform.chaos.moments import GIVEN_UP, now, progress_mark, wait_for
from rft_platform.chaos.records import Outcome, Struck, Violation
from rft_platform.chaos.schedule import Kill
from rft_platform.chaos.scratch import Scratch
from rft_platform.chaos.striking import strike, wait_for_moment
from rft_platform.chaos.supervised import Supervisor
from rft_platform.chaos.tending import LIMITS, TEND_S, Limits, Tender, everything_ends

_LOOK_S = 0.5  # interval at which the faults are counted
_STRIKES_A_PHASE = 3  # as often as the plan retries a phase


def run_project(
    supervisor: Supervisor,
    scratch: Scratch,
    kills: Sequence[Kill],
    seed: int,
    targets: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Kill as scheduled, let the project finish, and end its processes; returns a record of what happened.

    ``invariants.check_project`` checks afterwards whether rows, checkpoints, MLflow and Dagster are sound.
    """
    began, home = time.monotonic(), supervisor.home
    with everything_ends(home), Tender(supervisor) as tender:
        fire = _Fire(supervisor, scratch, tender, seed, tuple(targets), LIMITS[supervisor.mode], began, say)
        for kill in kills:
            fire.do(kill)
        fire.wait_for_faults()
        fire.finish()
        faults = supervisor.io_faults()
        fire.struck += faults.records() if faults is not None else []
        outcome = Outcome(
            supervisor.mode, seed, tuple(targets), tender.rounds, fire.struck, supervisor.ended, 0.0, fire.violations
        )
        check_open(home, outcome)
    check_stopped(home, outcome)
    outcome.wall_s = time.monotonic() - began
    return outcome


@dataclass(slots=True)
class _Fire:
    """Performs the kills of one project and records them."""

    supervisor: Supervisor
    scratch: Scratch
    tender: Tender
    seed: int
    targets: tuple[str, ...]
    limits: Limits
    began: float
    say: Callable[[str], None]
    struck: list[Struck] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    _strikes: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def do(self, kill: Kill) -> None:
        """Wait for the previous recovery (unless ``kill.hurry``) and for the planned moment, then kill."""
        if not kill.hurry:
            self._recover()
        home = self.supervisor.home
        on_time = wait_for_moment(home, self.scratch.checkpoints(home), kill, self.limits.moment_s)
        self._spare()
        mark = progress_mark(home)
        done = strike(home, kill, self.limits.victim_s, self.supervisor.expected)
        struck = Struck(
            kill=kill,
            mode=self.supervisor.mode,
            victim=f"no {kill.target} was running" if done.victim is None else str(done.victim),
            round=done.moment.round,
            phase=done.moment.phase,
            on_time=on_time,
            at=round(time.monotonic() - self.began, 2),
            hit=done.victim is not None,
        )
        self.struck.append(struck)
        if struck.hit:
            self._strikes[done.moment.half] += 1
            self.tender.watch(struck, mark, done.before)
        self.say(_line(struck))

    def wait_for_faults(self) -> None:
        """Let the project run until every file system fault has struck, or counts as missed after several starts."""
        faults = self.supervisor.io_faults()
        if faults is None:
            return
        left, changed_at = faults.left(), time.monotonic()
        while left and time.monotonic() - changed_at < self.limits.fault_s:
            self.tender.settled()  # raises errors of the harness
            if GIVEN_UP.wait(_LOOK_S):
                raise KeyboardInterrupt
            if faults.left() != left:
                left, changed_at = faults.left(), time.monotonic()
                self.say(f"{time.monotonic() - self.began:7.1f} s  {left} file system faults left")

    def finish(self) -> None:
        """Let the project run to its end undisturbed."""
        self._recover()
        rounds = self.tender.let_end()
        if not wait_for(self.supervisor.finished, self.limits.end_s, TEND_S):
            moment = now(self.supervisor.home)
            self._violated(
                "the project ends",
                f"not every one of {rounds} rounds was done {self.limits.end_s:.0f} s after the last kill: round "
                f"{moment.round} is at {moment.phase}",
            )

    def _spare(self) -> None:
        """Wait while the current phase has been hit as often as it is retried: another hit would require a person."""
        wait_for(lambda: self._strikes[now(self.supervisor.home).half] < _STRIKES_A_PHASE, self.limits.recovery_s)

    def _recover(self) -> None:
        if wait_for(self.tender.settled, self.limits.recovery_s, TEND_S):
            return
        moment = now(self.supervisor.home)
        for struck in self.tender.forget():
            self._violated(
                "every kill is recovered from",
                f"nothing went on for {self.limits.recovery_s:.0f} s after kill {struck.kill.number} "
                f"({struck.victim}); round {moment.round} is at {moment.phase}",
                struck.kill.number,
            )

    def _violated(self, invariant: str, message: str, number: int | None = None) -> None:
        last = [number] if number is not None else [struck.kill.number for struck in self.struck[-1:]]
        self.violations.append(
            Violation(invariant, message, self.supervisor.mode, self.seed, tuple(last), self.targets)
        )


def _line(struck: Struck) -> str:
    kill = struck.kill
    where = f"r{max(struck.round, 0):04d} {struck.phase}"
    what = kill.target if struck.hit else struck.victim
    return f"{struck.at:7.1f} s  kill {kill.number:3d}  {what} ({kill.how}) at {where}, planned for {kill.point}"
