"""Records of a chaos campaign: each kill with its recovery time, processes that ended by themselves, violations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from chaos.schedule import Kill, Mode


@dataclass(slots=True)
class Injection:
    """A kill that was performed or missed."""

    kill: Kill
    mode: Mode
    victim: str  # the process, or the reason why none was killed
    round: int
    phase: str  # the project's phase at the kill
    on_time: bool  # False: the planned moment did not come in time, and the kill was done anyway
    at: float  # seconds since the project's start
    recovery_s: float | None = None  # until a successor ran and the project made progress; None: it ended earlier
    hit: bool = True  # False: no such process was found in time


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of the harness that ended without being killed, and its output."""

    role: str
    exit_code: int
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str
    message: str
    mode: Mode
    seed: int
    kills: tuple[int, ...]  # numbers of the kills that may have caused it: replay up to the last of them

    targets: tuple[str, ...]  # of the mode

    @property
    def replay(self) -> str:
        """The command that repeats the same kills, up to the last one that may have caused the violation."""
        kills = max(self.kills, default=1)
        ray = "--ray " if self.mode == "ray" else ""
        return f"python -m chaos {ray}--seed {self.seed} --kills {kills} --targets {','.join(self.targets)}"

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.kills)) or "none"
        return f"{self.invariant}: {self.message} [after kill {numbers} of mode {self.mode}; replay: {self.replay}]"


@dataclass(slots=True)
class Outcome:
    """The results of one project of the campaign."""

    mode: Mode
    seed: int
    targets: tuple[str, ...]
    rounds: int
    injections: list[Injection]
    ended: list[Ended]
    wall_s: float
    violations: list[Violation] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # measurements of the invariants
    budgets: tuple[int, ...] = ()  # every budget that it had: its last round is always evaluated

    def kills_of_round(self, number: int) -> tuple[int, ...]:
        """The kills that were performed while this round was the newest."""
        return tuple(
            injection.kill.number for injection in self.injections if injection.round == number and injection.hit
        )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The campaign as plain JSON values: kills by target and phase, recovery times, violations, and every kill."""
    done = [injection for outcome in outcomes for injection in outcome.injections if injection.hit]
    return {
        "kills": len(done),
        "missed": sum(not injection.hit for outcome in outcomes for injection in outcome.injections),
        "seeds": sorted({outcome.seed for outcome in outcomes}),
        "by_target": dict(Counter(injection.kill.target for injection in done)),
        "by_phase": dict(Counter(injection.phase for injection in done)),
        "by_signal": dict(Counter(injection.kill.how for injection in done)),
        "by_target_and_phase": _nested(done),
        "recovery_s": {
            target: _spread([s.recovery_s for s in done if s.kill.target == target and s.recovery_s is not None])
            for target in sorted({injection.kill.target for injection in done})
        },
        "recovery_s_all": _spread([s.recovery_s for s in done if s.recovery_s is not None]),
        "violations": [
            {**asdict(violation), "replay": violation.replay}
            for outcome in outcomes
            for violation in outcome.violations
        ],
        "projects": [_project(outcome) for outcome in outcomes],
    }


def _nested(done: Sequence[Injection]) -> dict[str, dict[str, int]]:
    targets = sorted({injection.kill.target for injection in done})
    return {name: dict(Counter(s.phase for s in done if s.kill.target == name)) for name in targets}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"n": len(values), "median": round(median(values), 2), "max": round(max(values), 2)}


def _project(outcome: Outcome) -> dict[str, Any]:
    return {
        "mode": outcome.mode,
        "rounds": outcome.rounds,
        "wall_s": round(outcome.wall_s, 1),
        "facts": outcome.facts,
        "ended": [asdict(ended) for ended in outcome.ended],
        "kills": [
            {**asdict(injection.kill), **{k: v for k, v in asdict(injection).items() if k != "kill"}}
            for injection in outcome.injections
        ],
    }
