"""Input and output of ``plan_next``: what a project's rounds have reached, and what may run next."""

from dataclasses import dataclass, field
from typing import Literal

from rft_platform.config.resolve import OfflineKind
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.selection.pending_rows import PendingRows

ActionKind = Literal["warm_start", "explore", "collect", "sync", "evaluate"] | OfflineKind
SyncStyle = Literal["fixed", "dynamic_by_explorer", "dynamic_by_trainer"]

RETRY_GROWTH = 4.0
LONGEST_RETRY_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class LaunchState:
    """A unit that the plan launches and retries as one Dagster run: the warm start, or one part of a round.

    ``explore`` covers the stages ``snapshot``, ``explore`` and ``judge`` of ``Round``; ``sync`` covers ``train``
    and ``evaluate``.
    """

    done: bool = False
    running: bool = False
    failures: int = 0  # failed launches since the last success
    launches: int = 0  # all that have ended, failed or not
    cause: str = ""  # of the last failure, in one line
    retryable: bool = True  # whether a retry may help, according to the last failure
    failed_at: float | None = None  # end of the last failure on the clock of ``ProjectState.now``; None: unknown


@dataclass(frozen=True, slots=True)
class RoundState:
    """One round: exploration (rollouts and judgement), then sync (training, weight update, evaluation if due)."""

    number: int
    explore: LaunchState = LaunchState()
    sync: LaunchState = LaunchState()
    experiences: int = 0  # judged rows on disk, of a round that has not trained yet


@dataclass(frozen=True, slots=True)
class ProjectState:
    """All rounds that have started, in order from 1, and the settings that decide what runs next."""

    rounds: tuple[RoundState, ...] = ()
    rounds_budget: int = 1
    experiences_needed: int = 1  # rows of a whole round: with that many, a round may train before it is explored
    offset_rounds: int = 0  # rounds by which exploration may lead training; dynamic styles: 0 is no limit
    sync_style: SyncStyle = "fixed"
    rows_a_step: int = 1  # dynamic styles: experiences per optimiser step
    rows_wanted: int = 1  # dynamic styles: number of experiences at which a training may start
    max_staleness: int | None = None  # dynamic styles: largest age of a row at the start of its training, in versions
    landed: PendingRows = field(default_factory=PendingRows)
    warm_start: LaunchState | None = None  # None: the project has none
    mode: Literal["both", "explore", "train", "bench"] = "both"
    other_half: bool = False  # modes explore and train: another driver does the other half at the same time
    unmeasured: tuple[tuple[int, LaunchState], ...] = ()  # mode bench: rounds whose policy is not evaluated yet
    offline: OfflineKind | None = None  # a training on a dataset: the only round, without exploration
    committed_rows: int | None = None  # online: rows of production traffic for the next round; None: rows are explored
    rows_above_share: int = 0  # online: committed rows that the next round leaves out, above a limit of their owners
    paused: str | None = None  # online: the alerts because of which nothing is collected or trained
    max_failures: int = 4  # the first launch and three retries
    first_retry_s: float = 3.0  # wait before the first retry; each further one waits RETRY_GROWTH times as long
    now: float = 0.0  # seconds on the clock of the failed launches' end times


@dataclass(frozen=True, slots=True)
class Action:
    """One launch: the sensor's run request, or the in-process driver's next job."""

    kind: ActionKind
    round: int  # 0 for the warm start
    attempt: int

    @property
    def run_key(self) -> str:
        """Identity of the launch: Dagster launches a key once. The attempt number allows a retry after a failure."""
        return f"{self.kind}:{round_key(self.round)}:{self.attempt}"

    @property
    def partition(self) -> str | None:
        """The Dagster partition of the launch; None for the warm start, which has none."""
        return None if self.kind == "warm_start" else round_key(self.round)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to launch now, and the reasons for waiting as text."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()
    finished: bool = False
    failed: str | None = None
    retry_in: float | None = None  # seconds until the next retry may be launched, if the plan waits for one
