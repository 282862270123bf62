"""Build the ProjectState for the plan: the state on disk, joined with the orchestrator's record of its launches."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.planning.plan import LaunchState, ProjectState, RoundState
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, read
from rft_platform.rounds.reporting.bench import unmeasured
from rft_platform.rounds.selection.row_selection import (
    PendingRows,
    is_sound,
    pending_rows,
    replayable_rows,
    rows_wanted,
    trained_through,
)

_DONE, _NOT_BEGUN = LaunchState(done=True), LaunchState()

#: Cache of closed rounds without a launch, by store and round number: folder, its modification time, state. A note that
#: is added or removed changes that time. A tick over 10,000 rounds then stats 10,000 folders and reads no note.
_closed: dict[str, dict[int, tuple[str, int, RoundState]]] = {}
_SETTLED_NS = 2_000_000_000

#: Environment variable: seconds before the first retry.
RETRY_DELAY = "RFT_RETRY_DELAY_S"


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed launches of one kind in a round since the last success, and the details of the newest one."""

    count: int
    cause: str = ""
    retryable: bool = True
    ended_at: float | None = None  # seconds on the clock that is passed to ``observe``


@dataclass(frozen=True, slots=True)
class Launches:
    """The orchestrator's record of its launches, by (kind, round): running, failed, and the next attempt's number."""

    running: frozenset[tuple[str, int]] = frozenset()
    failures: dict[tuple[str, int], Failures] = field(default_factory=dict)
    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    interrupted: frozenset[tuple[str, int]] = frozenset()  # the members of ``running`` whose driver process is gone

    def state_of(self, kind: str, number: int, done: bool) -> LaunchState:
        """The state of one kind of launch in a round, for the plan."""
        key = (kind, number)
        if key not in self.running and key not in self.ended and key not in self.failures:
            return _DONE if done else _NOT_BEGUN  # most launches of a long project
        failed = self.failures.get(key, Failures(0))
        return LaunchState(
            done=done,
            running=key in self.running,
            failures=failed.count,
            ended=self.ended.get(key, failed.count),
            cause=failed.cause,
            retryable=failed.retryable,
            failed_at=failed.ended_at,
        )


def observe(
    project: Project, launches: Launches, now: float | None = None, *, other_half: bool = False
) -> ProjectState:
    """The state on which ``plan_next`` decides. Reads the notes of open rounds only.

    ``other_half``: in mode explore or train another driver does the other half.
    ``now`` is the time on the clock of the launches' end times; None means seconds since the epoch.
    """
    mode, sync = project.config.mode, project.config.synchronizer
    through = trained_through(project) if sync.dynamic else 0
    waiting = None if project.traffic is None else project.traffic.waiting()
    return ProjectState(
        rounds=tuple(_observe_rounds(project, launches, through)),
        rounds_budget=project.rounds_budget,
        experiences_needed=project.batches.experiences_a_round,
        offset_rounds=sync.offset_rounds,
        sync_style="fixed" if project.settings.offline is not None else sync.sync_style,
        rows_a_step=project.batches.train_batch_size,
        rows_wanted=rows_wanted(project),
        max_staleness=sync.max_staleness,
        landed=_landed(project, through) if sync.dynamic and project.settings.offline is None else PendingRows(),
        warm_start=launches.state_of("warm_start", 0, done=read(project.store, 0).has(RoundEvaluation)),
        offline=project.settings.offline,
        committed_rows=None if waiting is None else waiting.rows,
        rows_above_share=0 if waiting is None else waiting.above_share,
        paused=None if project.traffic is None else project.traffic.training_pause(),
        mode=mode if mode in ("explore", "train", "bench") else "both",
        other_half=other_half,
        unmeasured=_unmeasured(project, launches) if mode == "bench" else (),
        now=time.time() if now is None else now,
        first_retry_s=first_retry_s(),
    )


def _landed(project: Project, through: int) -> PendingRows:
    """The landed rows, with the replayable rows counted only if the fresh ones are not enough."""
    found = pending_rows(project, through)
    if 0 < found.rows < rows_wanted(project):
        return replace(found, replayable=replayable_rows(project, found.settled + 1))
    return found


def _unmeasured(project: Project, launches: Launches) -> tuple[tuple[int, LaunchState], ...]:
    return tuple((number, launches.state_of("evaluate", number, done=False)) for number in unmeasured(project))


def first_retry_s() -> float:
    """Seconds before the first retry of a failed launch: ``RFT_RETRY_DELAY_S``, or else the plan's default."""
    value = os.environ.get(RETRY_DELAY, "")
    if not value:
        return ProjectState().first_retry_s
    try:
        return max(0.0, float(value))
    except ValueError as error:
        raise UserError(f"{RETRY_DELAY}={value!r}: expected a number of seconds, such as 3") from error


def _begun(project: Project, launches: Launches) -> int:
    """The highest round with files or launches.

    A launch for a round far beyond those on disk comes from a mistyped partition, does nothing, and is ignored.
    """
    on_disk = max(project.store.rounds(), default=0)
    reachable = on_disk + 1 + project.config.synchronizer.offset_rounds
    return max([on_disk, *(number for _, number in _keys(launches) if number <= reachable)])


def _keys(launches: Launches) -> list[tuple[str, int]]:
    return [*launches.running, *launches.failures, *launches.ended]


def _observe_rounds(project: Project, launches: Launches, through: int) -> Iterator[RoundState]:
    """The state of every round, starting with round 1.

    ``through``, in dynamic styles, is the last round whose rows have all been trained on.
    """
    root, launched = str(project.store.root), {number for _, number in _keys(launches)}
    unchanged = _unchanged_rounds(root)
    for number in range(1, _begun(project, launches) + 1):
        closed = None if number in launched else unchanged.get(number) or _closed_round(project, number)
        yield closed or _observe_round(project, launches, number, through)


def _unchanged_rounds(root: str) -> dict[int, RoundState]:
    """The cached closed rounds whose folders have not changed since."""
    unchanged = {}
    for number, (folder, changed_at, state) in _closed.get(root, {}).items():
        try:
            if os.stat(folder).st_mtime_ns == changed_at:  # noqa: PTH116
                unchanged[number] = state
        except FileNotFoundError:
            continue
    return unchanged


def _closed_round(project: Project, number: int) -> RoundState | None:
    """The state of a closed round, i.e. one with notes of policy and evaluation; None for an open round.

    It is cached unless its folder changed so recently that another change could have the same time stamp.
    """
    record, root = read(project.store, number), str(project.store.root)
    if not (record.has(Policy) and record.has(RoundEvaluation)):
        return None
    folder = f"{root}/{round_key(number)}"
    state, changed_at = RoundState(number, _DONE, _DONE), os.stat(folder).st_mtime_ns  # noqa: PTH116
    if time.time_ns() - changed_at > _SETTLED_NS:
        _closed.setdefault(root, {})[number] = (folder, changed_at, state)
    return state


def _observe_round(project: Project, launches: Launches, number: int, through: int) -> RoundState:
    """The state of a round that is open or was launched recently; these rounds make up the cost of a tick."""
    record = read(project.store, number)
    synced = record.has(Policy)
    evaluated = synced and record.has(RoundEvaluation)
    explored = synced or number <= through or is_sound(project.store, number)
    return RoundState(
        number,
        explore=launches.state_of("explore" if project.traffic is None else "collect", number, done=explored),
        sync=launches.state_of(project.settings.offline or "sync", number, done=evaluated),
    )
