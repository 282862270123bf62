"""What a project's rounds have reached so far, and what may run next: the input and the output of ``plan_next``."""

from dataclasses import dataclass
from typing import Literal

from rft_platform.config.offline import OfflineKind
from rft_platform.experience.rounds import round_key

ActionKind = Literal["warm_start", "explore", "sync", "evaluate"] | OfflineKind
SyncStyle = Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer"]

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
class Landed:
    """Dynamic styles: what was explored and judged and no training has taken yet, and the newest training settled."""

    rounds: int = 0  # explored batches of which rows are left
    rows: int = 0  # their rows that no filter dropped
    replayable: int = 0  # rows that trained before and may again (replay)
    settled: int = 0  # the newest training whose rows are settled; 0: none
    taken: tuple[int, ...] = ()  # batches of which it takes rows for the first time, while its policy is not published
    training_steps: int = 0  # its optimiser steps, while its policy is not published


@dataclass(frozen=True, slots=True)
class ProjectState:
    """All rounds begun so far, in order from 1, and the settings that decide what comes next."""

    rounds: tuple[RoundState, ...] = ()
    rounds_budget: int = 1
    experiences_needed: int = 1  # rows that let a round train before its exploration has ended: those of a whole one
    sync_offset: int = 0  # rounds that exploration may run ahead of training; dynamic styles: 0 is no bound
    sync_style: SyncStyle = "fixed"
    rows_a_step: int = 1  # dynamic styles: experiences an optimiser step
    rows_wanted: int = 1  # dynamic styles: experiences that let a training begin
    max_staleness: int | None = None  # dynamic styles: policy versions a row may be old when its training begins
    landed: Landed = Landed()
    warm_start: PhaseState | None = None  # None: the project has none
    mode: Literal["both", "explore", "train", "bench"] = "both"
    unmeasured: tuple[tuple[int, PhaseState], ...] = ()  # mode bench: rounds whose policy is still to be evaluated
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

    @property
    def partition(self) -> str | None:
        """The Dagster partition it is launched for; None for the warm start, which has none."""
        return None if self.kind == "warm_start" else round_key(self.round)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch now, and in words what is waited for."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()
    finished: bool = False
    failed: str | None = None
    retry_in: float | None = None  # seconds until the next retry may be launched, where that is what is waited for
