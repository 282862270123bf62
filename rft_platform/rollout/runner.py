"""Rolls a workflow out on a batch of tasks and says what it came to."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from time import perf_counter, process_time
from typing import Any, Literal, get_args

from rft_platform.errors import EngineError, RftError, UserCodeError
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.rounds import round_key
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.rollout.report import RemoteFailure, RolloutBatch, RolloutReport, Tally, row_counts, said
from rft_platform.rollout.run import AgentLimits, ExploreBatch, Patience
from rft_platform.rollout.single_turn import run_single_turn
from rft_platform.rollout.workflow import AgentWorkflow, SingleTurnWorkflow, WorkerWorkflow, Workflow, WorkflowFunction
from rft_platform.tasks.task import Task

#: What becomes of a group with a failed run. ``complete``: the missing runs are tried once more, all attempts anew,
#: and the group is dropped if one still fails; ``drop``: it is dropped; ``partial``: what succeeded is kept.
GroupPolicy = Literal["complete", "drop", "partial"]

Progress = Callable[[int, int], None]  # runs done, runs in all

_PATIENT = Patience()


def run_rollouts(
    engine: PolicyEngine,
    tasks: Sequence[Task],
    workflow: Workflow,
    *,
    round: int,
    batch: int,
    repeat_times: int,
    sampling: SamplingParams,
    seed: int = 0,
    concurrency: int = 32,
    timeout_s: float = 1800.0,
    max_retries: int = 2,
    group_policy: GroupPolicy = "complete",
    auxiliary_models: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    patience: Patience = _PATIENT,
    truncated_reward: float | None = 0.0,
) -> RolloutBatch:
    """Run ``workflow`` ``repeat_times`` on every task; rows come in task order, ids and seeds depend on nothing else.

    Args:
        sampling: how to sample; a call that names its own temperature, top_p, ... keeps it. ``n`` and ``seed`` are set
            by the runner.
        concurrency: runs at once. Like ``timeout_s`` (of one attempt at a run) and ``max_retries`` (attempts beyond
            the first) it concerns workflows that call the model themselves; a single-turn workflow is one batch.
        group_policy: what becomes of a group with a failed run; a failed run is never an experience. A run that
            ``patience`` stops is like a failed one, but is not tried again.
        patience: how long the slowest runs are waited for.
        truncated_reward: the reward of a run that outgrew the context and got none; None: such a run has failed.

    Raises:
        EngineError: the engine died, or every run failed by its fault.
        UserCodeError: every run failed; the last error is chained.
    """
    if group_policy not in get_args(GroupPolicy):
        raise ValueError(f"group_policy {group_policy!r}: expected one of {', '.join(get_args(GroupPolicy))}")
    started, cpu = perf_counter(), process_time()
    status = engine.status()
    explored = ExploreBatch(round, batch, tasks, repeat_times, sampling, seed)
    if isinstance(workflow, SingleTurnWorkflow):
        rows, tally = run_single_turn(engine, status, workflow, explored), Tally()
        if on_progress is not None:
            on_progress(len(tasks) * repeat_times, len(tasks) * repeat_times)
    else:
        passes = 2 if group_policy == "complete" else 1
        limits = AgentLimits(concurrency, timeout_s, max_retries, passes, patience, truncated_reward)
        rows, tally = _run_agents(engine, status, workflow, explored, limits, auxiliary_models, on_progress)
    if tasks and not rows:
        raise _all_failed(explored, tally)
    kept = rows if group_policy == "partial" else complete_groups(rows, repeat_times)
    report = RolloutReport(
        runs=len(tasks) * repeat_times,
        failed=len(tasks) * repeat_times - len({row.run_id for row in rows}) - len(tally.stopped_runs),
        seconds=perf_counter() - started,
        cpu_s=process_time() - cpu,
        engine_cpu_s=engine.status().cpu_seconds - status.cpu_seconds,
        **tally.counts(),
        **row_counts(kept),
        **_group_counts(explored, kept, tally),
    )
    return RolloutBatch(kept, report)


def complete_groups(rows: Sequence[RolloutRow], repeat_times: int) -> list[RolloutRow]:
    """The rows of those groups that have ``repeat_times`` runs; the rows of a group stand side by side."""
    groups = (list(group) for _, group in groupby(rows, key=attrgetter("group_id")))
    return [row for group in groups if len({row.run_id for row in group}) == repeat_times for row in group]


def _group_counts(batch: ExploreBatch, kept: Sequence[RolloutRow], tally: Tally) -> dict[str, Any]:
    """The fields of a report that say what became of groups that are not whole."""
    runs = Counter(row.group_id for row in {row.run_id: row for row in kept}.values())
    lost = {run.group_id for run in batch.runs()} - runs.keys()
    stopped_runs = set(tally.stopped_runs)
    stopped = len(lost & {run.group_id for run in batch.runs() if run.run_id in stopped_runs})
    reasons = {"stopped": stopped, "failed": len(lost) - stopped}
    return {
        "dropped_groups": len(lost),
        "partial_groups": sum(count < batch.repeat_times for count in runs.values()),
        "dropped_for": {reason: count for reason, count in reasons.items() if count},
    }


def _run_agents(
    engine: PolicyEngine,
    status: EngineStatus,
    workflow: WorkflowFunction | AgentWorkflow | WorkerWorkflow,
    batch: ExploreBatch,
    limits: AgentLimits,
    auxiliary_models: Mapping[str, Any] | None,
    on_progress: Progress | None,
) -> tuple[list[RolloutRow], Tally]:
    """Rows of all runs that succeeded, in run order, and what went wrong with the others."""
    from rft_platform.rollout.agents import AgentRunner
    from rft_platform.rollout.inprocess import InProcess  # imports openai
    from rft_platform.rollout.workers import WorkerPool

    runner, runs = AgentRunner(engine, status, batch.seed, limits), batch.runs()
    executor: Any
    if isinstance(workflow, WorkerWorkflow):
        executor = WorkerPool(engine, status, workflow, batch.sampling, limits, auxiliary_models)
    else:
        executor = InProcess(engine, status, workflow, batch.sampling, limits, auxiliary_models)
    done = runner.execute(runs, executor, on_progress)
    return [row for run in runs for row in done.get(run.run_id, [])], runner.tally


def _all_failed(batch: ExploreBatch, tally: Tally) -> RftError:
    error = tally.last_error
    what = f"{round_key(batch.round)}, batch {batch.number}: all {len(batch.tasks) * batch.repeat_times} runs failed"
    if error is None or isinstance(error, EngineError):
        return EngineError(f"{what}: {error or 'the engine aborted every answer'}")
    place = f" ({error.place})" if isinstance(error, RemoteFailure) and error.place else ""
    failure = UserCodeError(f"{what}, the last with {said(error)}{place}; run the workflow on one task alone")
    failure.__cause__ = error
    return failure
