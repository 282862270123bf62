"""The loop's one brain: given what stands on disk, what runs next and what is waited for.

Sensors (under the daemon) and the in-process driver both ask here, so a project advances alike whoever drives it.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from rft_platform.experience.rounds import round_key
from rft_platform.rounds.state import Action, ActionKind, PhaseState, Plan, ProjectState, RoundState

#: What one part of the project does next: launch, wait for something (said in words), stop as failed; None: it is done.
Step: TypeAlias = Action | str | Plan


def plan_next(state: ProjectState) -> Plan:
    """Decide the launches that may start now. Pure: equal states give equal plans.

    Order of a project: the warm start, then for each round exploration and sync. Round k may explore once round
    ``k - 1 - sync_offset`` is synced; it may train once it is explored and round k-1 is synced. Explorations run one
    after another, and so do syncs; with an offset the two overlap.
    """
    if state.warm_start is not None and not state.warm_start.done:
        return _collect([_phase_step("warm_start", 0, state.warm_start, state.max_failures)])
    wanted = _last_round(state)
    steps = [step for step in (_next_exploration(state, wanted), _next_sync(state, wanted)) if step is not None]
    if not steps:
        return Plan(finished=True)
    return _collect(steps)


def _last_round(state: ProjectState) -> int:
    """Mode train works off the rounds that were explored elsewhere; the other modes fill the budget."""
    return len(state.rounds) if state.mode == "train" else state.rounds_budget


def _next_exploration(state: ProjectState, wanted: int) -> Step | None:
    if state.mode == "train":
        return None
    number = 1 + sum(1 for r in _leading(state, "explore"))
    if number > wanted:
        return None
    phase = _round(state, number).explore
    needs = number - 1 - state.sync_offset
    if state.mode == "both" and needs >= 1 and not _round(state, needs).sync.done and not phase.running:
        return f"{round_key(number)} explores after {round_key(needs)} is trained"
    return _phase_step("explore", number, phase, state.max_failures)


def _next_sync(state: ProjectState, wanted: int) -> Step | None:
    if state.mode == "explore":
        return None
    number = 1 + sum(1 for r in _leading(state, "sync"))
    if number > wanted:
        return None
    current = _round(state, number)
    if not current.explore.done and current.experiences < state.experiences_needed:
        return f"{round_key(number)}: {current.experiences}/{state.experiences_needed} rows"
    return _phase_step("sync", number, current.sync, state.max_failures)


def _phase_step(kind: ActionKind, number: int, phase: PhaseState, max_failures: int) -> Step:
    name = kind if kind == "warm_start" else f"{round_key(number)} {kind}"
    if phase.running:
        return f"{name} is running"
    if phase.failures >= max_failures:
        return Plan(failed=f"{name} failed {phase.failures} times: see its last run, mend the cause, then launch it")
    return Action(kind=kind, round=number, attempt=phase.failures)


def _leading(state: ProjectState, phase: Literal["explore", "sync"]) -> Iterator[RoundState]:
    """The rounds from the first on whose ``phase`` is done without a gap."""
    for current in state.rounds:
        if not getattr(current, phase).done:
            return
        yield current


def _round(state: ProjectState, number: int) -> RoundState:
    return state.rounds[number - 1] if number <= len(state.rounds) else RoundState(number)


def _collect(steps: list[Step]) -> Plan:
    failed = [step.failed for step in steps if isinstance(step, Plan)]
    return Plan(
        actions=tuple(step for step in steps if isinstance(step, Action)),
        waiting=tuple(step for step in steps if isinstance(step, str)),
        failed=failed[0] if failed else None,
    )
