"""What a project's rounds have reached so far, and what may run next: the input and the output of ``plan_next``."""

from dataclasses import dataclass
from typing import Literal

from rft_platform.config.offline import OfflineKind
from rft_platform.experience.rounds import round_key

ActionKind = Literal["warm_start", "explore", "sync"] | OfflineKind

RETRY_GROWTH = 4.0
LONGEST_RETRY_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class PhaseState:
    """One launchable piece of work (the warm start, a round's exploration, a round's training)."""

    done: bool = False
    running: bool = False
    failures: int = 0  # launches that ended in failure since the last one that succeeded
    launches: int = 0  # all that have ended, however they did
    cause: str = ""  # of the last failure, in one line
    retryable: bool = True  # whether launching it again may help, as the last failure has it
    failed_at: float | None = None  # when it ended, on the clock of ``ProjectState.now``; None: unknown


@dataclass(frozen=True, slots=True)
class RoundState:
    """One round: exploration (rollouts and judgement), then sync (training, weight update, evaluation if due)."""

    number: int
    explore: PhaseState = PhaseState()
    sync: PhaseState = PhaseState()
    experiences: int = 0  # judged rows on disk, of a round that has not trained yet


@dataclass(frozen=True, slots=True)
class ProjectState:
    """All rounds begun so far, in order from 1, and the settings that decide what comes next."""

    rounds: tuple[RoundState, ...] = ()
    rounds_budget: int = 1
    experiences_needed: int = 1  # rows that let a round train before its exploration has ended
    sync_offset: int = 0  # rounds that exploration may run ahead of training
    warm_start: PhaseState | None = None  # None: the project has none
    mode: Literal["both", "explore", "train"] = "both"
    offline: OfflineKind | None = None  # a training on a dataset: the only round, without exploration
    max_failures: int = 4  # the first launch and three retries
    first_retry_s: float = 3.0  # wait before the first retry; each further one waits RETRY_GROWTH times as long
    now: float = 0.0  # seconds on the clock that the ends of failed launches were taken from


@dataclass(frozen=True, slots=True)
class Action:
    """One launch: the sensor's run request, or the in-process driver's next job."""

    kind: ActionKind
    round: int  # 0 for the warm start
    attempt: int

    @property
    def run_key(self) -> str:
        """Identity of the launch: asked for twice, launched once. The attempt lets a failed launch be repeated."""
        return f"{self.kind}:{round_key(self.round)}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch now, and in words what is waited for."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()
    finished: bool = False
    failed: str | None = None
    retry_in: float | None = None  # seconds until the next retry may be launched, where that is what is waited for
