"""Judging runs, and turning the judgements into judged rows with advantages."""

import asyncio
import inspect
import logging
import math
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rft_platform.algorithms.advantages.registry import compute_advantages
from rft_platform.errors import StorageError, UserCodeError, UserError
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.responses import decode_response
from rft_platform.faults import user_place
from rft_platform.judging.compose import JudgeSpec
from rft_platform.judging.shaping import OVERLONG, Shaping, shape
from rft_platform.signature import accepted_arguments
from rft_platform.tasks.task import Task

JUDGE_ERROR = "judge_error"  #: ``dropped_by`` of the rows of a run that its judge failed on
WORKFLOW_REWARD = "workflow"  #: ``judge_version`` of rewards that the workflows gave themselves

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """The judgement of one run: a reward and its parts, or the error that prevented it."""

    run_id: str
    task_id: str
    reward: float  # NaN where ``error`` is given
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JudgedRollouts:
    """Judged rows in the order of the rollout rows, and what each run got."""

    rows: list[JudgedRow]
    runs: list[RunJudgement]

    @property
    def errors(self) -> list[RunJudgement]:
        """The runs that the judge failed on."""
        return [run for run in self.runs if run.error is not None]


def judge_runs(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judge: JudgeSpec | None,
    *,
    needs_reward: bool = True,
    concurrency: int = 16,
    auxiliary_models: Mapping[str, Any] | None = None,
) -> list[RunJudgement]:
    """Judge every run, in order of first appearance.

    The judge gets the task's raw row and what the workflow returned, or else the text of the run's last answer. With
    no judge the workflow's own reward counts; without ``needs_reward`` a run may have none and gets 0. Judges written
    with ``async def`` run ``concurrency`` at a time, others one after the other. A judge that fails on a run leaves
    that run without a reward.

    Raises:
        StorageError: a row belongs to none of the tasks.
        UserError: there is neither a judge nor a reward from the workflow.
        UserCodeError: the judge failed on every run.
    """
    last_rows = _last_rows(rows)
    for row in last_rows:
        if row.task_id not in tasks:
            raise StorageError(f"run {row.run_id}: task {row.task_id} is not in the taskset that it is judged against")
    if judge is None:
        return [_own_reward(row, needs_reward) for row in last_rows]
    judgements = _wait(_judge_all(last_rows, tasks, judge, concurrency, auxiliary_models))
    failed = [judgement for judgement in judgements if judgement.error]
    if failed and len(failed) == len(judgements):
        raise UserCodeError(f"the judge failed on all {len(judgements)} runs; the first: {failed[0].error}")
    if failed:
        first = f"run {failed[0].run_id} (task {failed[0].task_id}): {failed[0].error}"
        _log.warning(
            "the judge failed on %d of %d runs, which are left out; the first: %s", len(failed), len(judgements), first
        )
    return judgements


def judge_rollouts(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judge: JudgeSpec | None,
    *,
    advantage_fn: str | None,
    advantage_args: Mapping[str, Any] | None = None,
    shaping: Shaping | None = None,
    needs_reward: bool = True,
    concurrency: int = 16,
    auxiliary_models: Mapping[str, Any] | None = None,
) -> JudgedRollouts:
    """Judge every run and give each of its rows the run's reward and its advantage.

    Rows of runs that the judge failed on have reward NaN and ``dropped_by`` set; these, and those that ``shaping``
    leaves out, take no part in the advantages of their group. ``advantage_fn`` None (algorithms without one) leaves
    every advantage 0. Raises as ``judge_runs``.
    """
    runs = judge_runs(
        rows, tasks, judge, needs_reward=needs_reward, concurrency=concurrency, auxiliary_models=auxiliary_models
    )
    runs, dropped_by = _shaped(rows, runs, shaping or Shaping())
    by_run = {run.run_id: run for run in runs}
    kept = [row for row in rows if row.run_id not in dropped_by]
    advantages = dict.fromkeys((row.row_id for row in rows), 0.0)
    if advantage_fn is not None and kept:
        values = compute_advantages(
            advantage_fn,
            [by_run[row.run_id].reward for row in kept],
            [row.group_id for row in kept],
            [row.run_id for row in kept],
            [row.step for row in kept],
            columns={"env_state_hash": [row.env_state_hash for row in kept]},
            **(advantage_args or {}),
        )
        advantages.update(zip((row.row_id for row in kept), values.tolist(), strict=True))
    version = WORKFLOW_REWARD if judge is None else judge.version
    judged = [
        _judged(row, by_run[row.run_id], advantages[row.row_id], version, dropped_by.get(row.run_id)) for row in rows
    ]
    return JudgedRollouts(judged, runs)


def _shaped(
    rows: Sequence[RolloutRow], runs: list[RunJudgement], shaping: Shaping
) -> tuple[list[RunJudgement], dict[str, str]]:
    """The runs with the rewards to learn from, and what keeps a run (by id) from training."""
    group = {row.run_id: row.group_id for row in rows}
    length: dict[str, int] = {}
    for row in rows:
        length[row.run_id] = max(length.get(row.run_id, 0), len(row.response_ids))
    sound = [run for run in runs if run.error is None]
    reward, penalty, dropped = shape(
        shaping,
        [run.reward for run in sound],
        [length[run.run_id] for run in sound],
        [group[run.run_id] for run in sound],
    )
    done = {
        run.run_id: replace(run, reward=float(total), parts={**run.parts, OVERLONG: float(part)})
        for run, total, part in zip(sound, reward, penalty, strict=True)
        if shaping.overlong is not None
    }
    dropped_by = {run.run_id: JUDGE_ERROR for run in runs if run.error is not None}
    dropped_by |= {run.run_id: why for run, why in zip(sound, dropped, strict=True) if why is not None}
    return [done.get(run.run_id, run) for run in runs], dropped_by


def _judged(row: RolloutRow, run: RunJudgement, advantage: float, version: str, dropped_by: str | None) -> JudgedRow:
    return JudgedRow(
        row_id=row.row_id,
        group_id=row.group_id,
        run_id=row.run_id,
        step=row.step,
        reward=run.reward,
        reward_parts=dict(run.parts),
        judge_version=version,
        advantage=advantage,
        dropped_by=dropped_by,
    )


def _last_rows(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    last: dict[str, RolloutRow] = {}
    for row in rows:
        if row.run_id not in last or row.step >= last[row.run_id].step:
            last[row.run_id] = row
    return list(last.values())


def _own_reward(row: RolloutRow, needs_reward: bool) -> RunJudgement:
    if row.run_reward is None:
        if not needs_reward:
            return RunJudgement(row.run_id, row.task_id, 0.0)
        raise UserError(
            f"task {row.task_id} of taskset {row.taskset!r}: run {row.run_id} has no reward. Give the taskset a judge, "
            "or let its workflow return WorkflowOutput(reward=...)"
        )
    return _checked(row, row.run_reward, {})


async def _judge_all(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judge: JudgeSpec,
    concurrency: int,
    auxiliary_models: Mapping[str, Any] | None,
) -> list[RunJudgement]:
    gate = asyncio.Semaphore(concurrency)
    offered = {"auxiliary_models": dict(auxiliary_models or {}), "logger": _log}
    extras = {part.name: accepted_arguments(part.function, offered) for part in judge.parts}

    async def judge_one(row: RolloutRow) -> RunJudgement:
        async with gate:
            try:
                return await _judge_run(row, tasks[row.task_id], judge, extras)
            except Exception as error:  # user code: whatever it raises is this run's error
                _log.debug("judge failed on run %s (task %s): %r", row.run_id, row.task_id, error)
                place = user_place(error)
                return _failed(row, f"{type(error).__name__}: {error}{f' ({place})' if place else ''}")

    return await asyncio.gather(*map(judge_one, rows))


async def _judge_run(row: RolloutRow, task: Task, judge: JudgeSpec, extras: dict[str, dict[str, Any]]) -> RunJudgement:
    response = row.response.get("content") if row.run_output is None else decode_response(row.run_output)
    reward, parts = 0.0, {}
    for part in judge.parts:
        output: Any = part.function(task=task.raw, response=response, **part.args, **extras[part.name])
        if inspect.isawaitable(output):
            output = await output
        value = float(getattr(output, "reward", output))  # a JudgeOutput, also another library's, or a number
        reward += part.weight * value
        parts[part.name] = value
        for name, metric in (getattr(output, "metrics", None) or {}).items():
            parts[f"{part.name}/{name}"] = float(metric)
    return _checked(row, reward, parts)


def _checked(row: RolloutRow, reward: float, parts: dict[str, float]) -> RunJudgement:
    if not math.isfinite(reward):
        return _failed(row, f"the reward is {reward}; expected a finite number")
    return RunJudgement(row.run_id, row.task_id, reward, parts)


def _failed(row: RolloutRow, error: str) -> RunJudgement:
    return RunJudgement(row.run_id, row.task_id, math.nan, {}, error)


def _wait(job: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result, wherever it is asked for: inside a running event loop a thread has its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, job).result()
