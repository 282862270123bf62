"""Metrics of the rounds: progress of the plan, rows in the store, results of the newest rounds."""

import os
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Literal

import rft_platform
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.planning.plan import Plan, ProjectState, RoundState, plan_next
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import RoundRecord, read
from rft_platform.rounds.reporting.round_history import time_split
from rft_platform.servers.metrics.catalogue import Sample

PHASES: tuple[Literal["explore", "sync"], ...] = ("explore", "sync")
PLAN_STATES = ("launching", "running", "waiting", "finished", "failed")
_LOOK_BACK = 200  # rounds whose records are searched; older results are not reported


def plan_samples(project: Project, launches: Launches) -> Iterator[Sample]:
    """Budget, frontier, running phases and the plan's state."""
    config, state = project.config, observe(project, launches)
    plan, running = plan_next(state), {kind for kind, _ in launches.running}
    online = "false" if project.traffic is None else "true"
    yield Sample("rft_project_info", 1, (config.project, config.name, config.mode, online, rft_platform.__version__))
    yield Sample("rft_rounds_budget", state.rounds_budget)
    yield Sample("rft_rounds_done", _leading(state, "sync"))
    for phase in PHASES:
        number = _frontier(state, phase)
        yield Sample("rft_frontier_round", number, (phase,))
        current = state.rounds[number - 1] if number <= len(state.rounds) else RoundState(number)
        yield Sample("rft_phase_failures", getattr(current, phase).failures, (phase,))
    if state.warm_start is not None:
        yield Sample("rft_phase_failures", 0 if state.warm_start.done else state.warm_start.failures, ("warm_start",))
    for kind in ("warm_start", *PHASES):
        yield Sample("rft_phase_running", kind in running, (kind,))
    now = plan_state(plan, bool(running))
    for name in PLAN_STATES:
        yield Sample("rft_plan_state", name == now, (name,))
    store, exploring = project.store, _frontier(state, "explore")
    yield Sample("rft_frontier_rows", store.count_rollouts(exploring), ("rollouts",))
    yield Sample("rft_frontier_rows", store.count_judged(exploring), ("judged",))


def plan_state(plan: Plan, running: bool) -> str:
    """The plan's state, one of ``PLAN_STATES``; a running launch takes precedence over launching and waiting."""
    if plan.finished:
        return "finished"
    if plan.failed:
        return "failed"
    if running:
        return "running"
    return "launching" if plan.actions else "waiting"


class RowTotals:
    """Counts the rows of all rounds; counts a round again only if its ledger or its judgement in force has changed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, int], int, int]] = {}

    def samples(self, project: Project) -> Iterator[Sample]:
        """Numbers of rollout rows and judged rows, from the ledgers."""
        store, totals = project.store, [0, 0]
        for number in store.rounds():
            folder = f"{store.root}/{round_key(number)}"  # str, because thousands of Path objects are slow
            stamp = _changed(f"{folder}/files.json"), _changed(f"{folder}/judged/current.json")
            known = self._known.get(number)
            if known is None or known[0] != stamp:
                known = self._known[number] = (stamp, store.count_rollouts(number), store.count_judged(number))
            totals[0] += known[1]
            totals[1] += known[2]
        yield Sample("rft_rows", totals[0], ("rollouts",))
        yield Sample("rft_rows", totals[1], ("judged",))


def outcome_samples(project: Project) -> Iterator[Sample]:
    """Newest policy, evaluation, mean reward, seconds by phase and last change, from the records of the last rounds."""
    store = project.store
    records = [read(store, number) for number in store.rounds()[::-1][:_LOOK_BACK]]
    if (policy := next(filter(None, (record.published() for record in records)), None)) is not None:
        yield Sample("rft_policy_version_trained", policy.policy_version)
    yield from _evaluation(records)
    judged = next(filter(None, (record.judged for record in records)), None)
    if judged is not None and judged.mean_reward is not None:
        yield Sample("rft_reward_mean", judged.mean_reward)
    yield from _time_split(records)
    written = [_changed(file) for record in records[:2] for file in store.round_folder(record.number).rglob("*")]
    if written:
        yield Sample("rft_last_progress_age_seconds", max(0.0, time.time() - max(written) / 1e9))


def _evaluation(records: list[RoundRecord]) -> Iterator[Sample]:
    for record in records:
        evaluated = record.evaluated
        if evaluated is None or not evaluated.results:
            continue
        yield Sample("rft_evaluation_round", record.number)
        for score in ("sampled_pass", "greedy_pass"):
            if score in evaluated.metrics:
                yield Sample("rft_evaluation_score", evaluated.metrics[score], (score,))
        return


def _time_split(records: list[RoundRecord]) -> Iterator[Sample]:
    for record in records:
        if record.number == 0 or record.evaluated is None:
            continue
        for part, seconds in time_split(record).items():
            yield Sample("rft_round_seconds", seconds, (part,))
        return


def _leading(state: ProjectState, phase: str) -> int:
    """Number of consecutive rounds, from the first, whose phase is done."""
    return sum(1 for _ in takewhile(lambda current: getattr(current, phase).done, state.rounds))


def _frontier(state: ProjectState, phase: str) -> int:
    return min(_leading(state, phase) + 1, max(state.rounds_budget, len(state.rounds), 1))


def _changed(file: str | Path) -> int:
    """Time of the last change in ns since the epoch; 0 if there is no such file."""
    try:
        return os.stat(file).st_mtime_ns  # noqa: PTH116
    except FileNotFoundError:
        return 0
