"""The scheduler of the loop: from the state on disk, decide what runs next and what is waited for.

The sensors (under the daemon) and the in-process driver both call ``plan_next``, so both run a project in the same way.
In the dynamic sync styles a training takes any rows that wait: here is decided when enough have landed, and when
exploration must wait.

Invariants:

- ``plan_next`` is pure: equal states give equal plans, so a plan can be computed by anybody at any time.
- Explorations run one after another, and so do trainings. An exploration and a training overlap only with an offset or
  in a dynamic style.
- Exploration never leads the trained policy by more rounds than the sync style permits.
- A launch that runs or is complete is not planned again; one that failed is planned after its wait, at most as often as
  the retries permit, and never if no retry can help.
- A plan without launches says why: it is finished, it waits (with a line for each reason), or it has failed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rft_platform.config.resolve import OfflineKind
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.selection.row_selection import PendingRows

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
    ended: int = 0  # launches, failed or not
    cause: str = ""  # of the last failure, in one line
    retryable: bool = True  # whether a retry may help, according to the last failure
    failed_at: float | None = None  # end of the last failure on the clock of ``ProjectState.now``; None: unknown


@dataclass(frozen=True, slots=True)
class RoundState:
    """One round: exploration (rollouts and judgement), then sync (training, weight update, evaluation if due)."""

    number: int
    explore: LaunchState = LaunchState()
    sync: LaunchState = LaunchState()


@dataclass(frozen=True, slots=True)
class ProjectState:
    """All rounds that have started, in order from 1, and the settings that decide what runs next."""

    rounds: tuple[RoundState, ...] = ()
    rounds_budget: int = 1
    experiences_needed: int = 1  # rows of a whole round; online: with that many committed rows the next round collects
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


def held_back(state: ProjectState, number: int) -> str | None:
    """The reason why batch ``number`` must not be explored before the next training; None if it may be explored.

    Exploration waits only if a trainer takes the rows that have landed, so the wait ends.
    """
    landed, key = state.landed, round_key(number)
    if state.offset_rounds and landed.rounds >= state.offset_rounds:
        batches = "1 batch has" if landed.rounds == 1 else f"{landed.rounds} batches have"
        return f"{key} explores after a training: {batches} landed without a training (synchronizer.sync_offset)"
    if state.max_staleness is None or not (landed.rounds or landed.training_steps):
        return None
    ahead = versions_ahead(state)
    if ahead <= state.max_staleness:
        return None
    return (
        f"{key} explores after a training: its rows would train {ahead} policy versions after they were sampled "
        f"(synchronizer.max_staleness {state.max_staleness})"
    )


def versions_ahead(state: ProjectState) -> int:
    """How many policy versions training may advance before it uses the rows of a batch that is explored now."""
    landed, step = state.landed, max(1, state.rows_a_step)
    if state.sync_style == "dynamic_by_trainer":  # fixed-size trainings, up to the one with the last row
        steps_a_unit = max(1, state.rows_wanted // step)
        units = (landed.rows + state.experiences_needed - 1) // max(1, state.rows_wanted)
        return landed.training_steps + steps_a_unit * units
    return landed.training_steps + (math.ceil(landed.rows / step) if has_enough(state) else 0)


def has_enough(state: ProjectState) -> bool:
    """Whether the landed rows, with the replayable ones, are enough for a training."""
    landed = state.landed
    return landed.rounds > 0 and landed.rows + landed.replayable >= state.rows_wanted


def trains(state: ProjectState, number: int, explored: int) -> bool | str:
    """Whether training ``number`` may start after ``explored`` batches; a str: what it waits for; False: it is done.

    If its rows are selected already (``settled``), the training continues as soon as these rows are stored again.
    """
    landed, key, over = state.landed, round_key(number), explored >= state.rounds_budget
    if number <= landed.settled:
        missing = [n for n in landed.taken if n > explored and number == landed.settled]
        return f"{key} trains when {round_key(missing[0])} is explored again" if missing else True
    if not landed.rounds:
        return False if over else f"{key} waits: 0 of {state.rows_wanted} experiences have landed"
    if has_enough(state) or over or _stopped(state, explored + 1):
        return True
    return f"{key} waits: {landed.rows} of {state.rows_wanted} experiences have landed"


def _stopped(state: ProjectState, number: int) -> bool:
    """Whether exploration waits for the next training. That training then starts with less than a full step."""
    running = number <= len(state.rounds) and state.rounds[number - 1].explore.running
    return not running and held_back(state, number) is not None


_GO_ON = (
    "Fix the cause and start it again (`rft run`, or tune() with this experiment_name), or launch the job by hand; "
    "if the fix changes a setting that decides results, set `name`, too, and use another RFT_HOME"
)

#: Next step of one part of the project: a launch, a wait (reason as text), a stop as failed, or None if it is done.
Step: TypeAlias = Action | str | Plan


def plan_next(state: ProjectState) -> Plan:
    """Decide the launches that may start now. Pure: equal states give equal plans.

    A project runs its warm start, then exploration and sync of each round. Round k may explore once round
    ``k - 1 - offset_rounds`` is synced; it may train once it is explored and round k-1 is synced. Explorations run one
    after another, and so do syncs; with an offset the two overlap. In modes explore and train the other half may be
    done by another driver; the order is the same. An offline training is a single launch.

    In the dynamic styles, batches are explored one after another. Training k takes the rows that have landed by then,
    from any round. It starts as soon as they are enough, or when no more will come. There are never more trainings than
    batches.
    """
    if state.mode == "bench":
        return _next_evaluation(state)
    if state.offline is not None:
        training = _round(state, 1).sync
        return Plan(finished=True) if training.done else _collect([_launch_step(state.offline, 1, training, state)])
    if state.warm_start is not None and not state.warm_start.done:
        if state.mode == "train" and state.other_half:
            return Plan(waiting=("r0000 is made by the driver of mode explore",))
        return _collect([_launch_step("warm_start", 0, state.warm_start, state)])
    wanted = _last_round(state)
    steps = [step for step in (_next_exploration(state, wanted), _next_sync(state, wanted)) if step is not None]
    if state.sync_style != "fixed":
        steps.reverse()  # a driver that runs one launch at a time trains as soon as there are enough rows
    if not steps:
        return Plan(finished=True)
    return _collect(steps)


def _next_evaluation(state: ProjectState) -> Plan:
    """Mode bench: evaluate one policy after another; if none exists, make the starting policy first."""
    if state.offline is None and state.warm_start is not None and not state.warm_start.done:
        return _collect([_launch_step("warm_start", 0, state.warm_start, state)])
    if not state.unmeasured:
        return Plan(finished=True)
    number, launch = state.unmeasured[0]
    return _collect([_launch_step("evaluate", number, launch, state)])


def _last_round(state: ProjectState) -> int:
    """The last round to process: that of the budget; in mode train without another driver, the last explored round."""
    explored = state.mode == "train" and state.sync_style == "fixed" and state.committed_rows is None
    return len(state.rounds) if explored and not state.other_half else state.rounds_budget


def _next_exploration(state: ProjectState, wanted: int) -> Step | None:
    if state.mode == "train" and state.committed_rows is None:
        return None
    number = 1 + sum(1 for r in _leading(state, "explore"))
    if number > wanted:
        return None
    launch = _round(state, number).explore
    if state.committed_rows is not None:
        return _next_collection(state, number, launch)
    if launch.running or not (state.mode == "both" or state.other_half):  # else no trainer would end the wait
        return _launch_step("explore", number, launch, state)
    if state.sync_style != "fixed":
        return held_back(state, number) or _launch_step("explore", number, launch, state)
    needs = number - 1 - state.offset_rounds
    if needs >= 1 and not _round(state, needs).sync.done:
        return f"{round_key(number)} explores after {round_key(needs)} is trained"
    return _launch_step("explore", number, launch, state)


def _next_collection(state: ProjectState, number: int, launch: LaunchState) -> Step:
    """Online: collect the committed rows of production traffic for a round once they are enough."""
    previous = number - 1 - state.offset_rounds
    if previous >= 1 and not _round(state, previous).sync.done and not launch.running:
        return f"{round_key(number)} collects rows after {round_key(previous)} is trained"
    if state.paused and not launch.running:
        return f"{round_key(number)} collects no rows{_pause(state.paused)}"
    if launch.running or launch.failures or (state.committed_rows or 0) >= state.experiences_needed:
        return _launch_step("collect", number, launch, state)
    above = state.rows_above_share
    return (
        f"{round_key(number)} collects rows when {state.experiences_needed:,} are committed, "
        f"{state.committed_rows or 0:,} so far"
        + (f"; {above:,} more are above the share of their task, subject or tenant (service.task_share, "
           "service.subject_share, service.tenant_share)" if above else "")
    )  # fmt: skip


def _pause(alerts: str) -> str:
    return f" while an alert is open: {alerts}; `rft models resume` continues the training"


def _next_sync(state: ProjectState, wanted: int) -> Step | None:
    if state.mode == "explore":
        return None
    number = 1 + sum(1 for r in _leading(state, "sync"))
    if state.sync_style != "fixed":
        return _next_training(state, number)
    if number > wanted:
        return None
    current = _round(state, number)
    if state.paused and current.explore.done and not current.sync.running:
        return f"{round_key(number)} does not train{_pause(state.paused)}"
    if not current.explore.done:
        return f"{round_key(number)} trains when it is explored"
    return _launch_step("sync", number, current.sync, state)


def _next_training(state: ProjectState, number: int) -> Step | None:
    """The next training of a dynamic style."""
    launch = _round(state, number).sync
    if launch.running:
        return _launch_step("sync", number, launch, state)
    ready = trains(state, number, explored=sum(1 for _ in _leading(state, "explore")))
    if ready is True:
        return _launch_step("sync", number, launch, state)
    return ready or None


def _launch_step(kind: ActionKind, number: int, launch: LaunchState, state: ProjectState) -> Step:
    name = kind if kind == "warm_start" else f"{round_key(number)} {kind}"
    if launch.running:
        return f"{name} is running"
    if launch.failures and not launch.retryable:
        return Plan(failed=f"{name} failed: {(launch.cause or 'see its last run').rstrip('.')}. {_GO_ON}")
    if launch.failures >= state.max_failures:
        said = f", at last with: {launch.cause.rstrip('.')}" if launch.cause else ": see its last run"
        return Plan(failed=f"{name} failed {launch.failures} times{said}. {_GO_ON}")
    wait = retry_wait(launch, state)
    if wait > 0:
        said = f": {launch.cause}" if launch.cause else ""
        retry = f"{name}: retry {launch.failures} of {state.max_failures - 1} in {math.ceil(wait)} s{said}"
        return Plan(waiting=(retry,), retry_in=wait)
    return Action(kind=kind, round=number, attempt=launch.ended)


def retry_wait(launch: LaunchState, state: ProjectState) -> float:
    """Seconds until a failed launch may be repeated; 0 if it may be repeated now.

    The wait also ends if the clock was set forward, or was set back by more than the wait: the time that has passed is
    then unknown.
    """
    if not launch.failures or launch.failed_at is None:
        return 0.0
    wait = min(state.first_retry_s * RETRY_GROWTH ** (launch.failures - 1), LONGEST_RETRY_WAIT_S)
    passed = state.now - launch.failed_at
    return 0.0 if passed < -wait else max(0.0, wait - passed)


def _leading(state: ProjectState, launch: Literal["explore", "sync"]) -> Iterator[RoundState]:
    """The rounds whose ``launch`` is done, from the first round up to the first gap."""
    for current in state.rounds:
        if not getattr(current, launch).done:
            return
        yield current


def _round(state: ProjectState, number: int) -> RoundState:
    return state.rounds[number - 1] if number <= len(state.rounds) else RoundState(number)


def _collect(steps: list[Step]) -> Plan:
    plans = [step if isinstance(step, Plan) else _as_plan(step) for step in steps]
    return Plan(
        actions=tuple(action for plan in plans for action in plan.actions),
        waiting=tuple(line for plan in plans for line in plan.waiting),
        failed=next((plan.failed for plan in plans if plan.failed), None),
        retry_in=min((plan.retry_in for plan in plans if plan.retry_in is not None), default=None),
    )


def _as_plan(step: Action | str) -> Plan:
    return Plan(waiting=(step,)) if isinstance(step, str) else Plan(actions=(step,))
