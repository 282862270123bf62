"""Evaluate a policy on held-out tasks with a workflow and a judge."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from rft_platform.common.errors import EngineError, UserError
from rft_platform.config.rollout_limits import Patience, RolloutLimits
from rft_platform.config.schema.buffer import MAX_ABS_REWARD
from rft_platform.evaluation.metrics import BOOTSTRAP_SEED
from rft_platform.evaluation.results import (
    GREEDY,
    SAMPLED,
    EvaluationResult,
    RunScore,
    Transcript,
    choose,
    result_of,
    tasks_digest,
    transcript,
)
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.judging.execution.compose import JudgeSpec
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.types import RunJudgement
from rft_platform.rollout.runner.report import RolloutBatch, RolloutReport
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import Workflow
from rft_platform.rollout.workflows.chat_models import framework_models
from rft_platform.tasks.task import ORIGIN, Task

PASS_THRESHOLD = 1.0  #: minimum reward of a passed run
_DEFAULT_LIMITS = RolloutLimits()
_log = logging.getLogger(__name__)


def evaluate(
    engine: PolicyEngine,
    tasks: Sequence[Task],
    *,
    workflow: Workflow,
    judge: JudgeSpec | None,
    sampled_n: int,
    greedy: bool,
    sampling: SamplingParams,
    seed: int,
    round: int,
    measured_by: str,
    bootstrap_seed: int = BOOTSTRAP_SEED,
    limits: RolloutLimits = _DEFAULT_LIMITS,
    transcripts: int = 6,
    max_abs_reward: float | None = MAX_ABS_REWARD,
    auxiliary_models: Mapping[str, Any] | None = None,
    policies: Mapping[str, PolicyEngine] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Run every task ``sampled_n`` times with ``sampling``, and once more at temperature 0 if ``greedy``.

    A run passes if its reward reaches ``PASS_THRESHOLD``. Failed runs, runs whose judgement fails, and runs with a
    reward beyond ``max_abs_reward`` are counted and left out of the scores. ``policies`` are the engines of further
    trainable policies; the scores are the rewards of the first policy. If ``judge`` is None, the workflow's reward
    counts. ``measured_by`` identifies judge, workflow and sampling in the result.

    Raises ``EngineError`` if the weights changed during the evaluation, and the errors of ``run_rollouts`` and
    ``judge_runs``.
    """
    started = perf_counter()
    evaluation = _Evaluation(
        engine=engine, tasks=tasks, workflow=workflow, judge=judge, max_abs_reward=max_abs_reward, seed=seed,
        round=round, limits=limits, auxiliary_models=auxiliary_models, policies=policies or {}, on_progress=on_progress,
    )  # fmt: skip
    passes = [evaluation.run(mode) for mode in _modes(tasks, sampled_n, greedy, sampling)]
    report = RolloutReport.merge([done.report for done in passes])
    return result_of(
        [score for done in passes for score in done.scores], PASS_THRESHOLD, bootstrap_seed,
        round=round, policy_version=_one_version(report), tasks=len({task.task_id for task in tasks}),
        tasks_digest=tasks_digest(task.task_id for task in tasks), sampled_n=sampled_n,
        temperature=sampling.temperature, seed=seed, failed_runs=report.failed + sum(done.unjudged for done in passes),
        completion_tokens=report.completion_tokens, truncated_share=report.truncated_share,
        seconds=perf_counter() - started, transcripts=choose(passes[0].transcripts, transcripts, PASS_THRESHOLD),
        measured_by=measured_by,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Mode:
    """How often every task is run, and with which sampling."""

    name: str
    batch: int
    repeat_times: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """The policy under test with its tasks, and the settings to run and judge them."""

    engine: PolicyEngine
    tasks: Sequence[Task]
    workflow: Workflow
    judge: JudgeSpec | None
    max_abs_reward: float | None
    seed: int
    round: int
    limits: RolloutLimits
    auxiliary_models: Mapping[str, Any] | None
    policies: Mapping[str, PolicyEngine]
    on_progress: Callable[[int, int], None] | None

    def run(self, mode: _Mode) -> "_Pass":
        """Run and judge all runs of one mode."""
        rollouts = run_rollouts(
            self.engine,
            self.tasks,
            self.workflow,
            round=self.round,
            batch=mode.batch,
            repeat_times=mode.repeat_times,
            sampling=mode.sampling,
            seed=self.seed,
            auxiliary_models=self.auxiliary_models,
            policies=self.policies,
            on_progress=self.on_progress,
            limits=replace(self.limits, group_policy="partial", patience=Patience()),  # keep every run
        )
        if mode.name == GREEDY:
            _warn_of_temperatures(rollouts)
        tasks = {task.task_id: task for task in self.tasks}
        runs = judge_runs(
            rollouts.rows,
            tasks,
            self.judge,
            max_abs_reward=self.max_abs_reward,
            auxiliary_models=framework_models(self.auxiliary_models),
        )
        return _judged(mode.name, rollouts, tasks, self.judge, runs)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The judged runs of one mode."""

    scores: list[RunScore]
    transcripts: list[Transcript]
    unjudged: int
    report: RolloutReport


def _modes(tasks: Sequence[Task], sampled_n: int, greedy: bool, sampling: SamplingParams) -> list[_Mode]:
    if not tasks:
        raise UserError("evaluation: the held-out taskset is empty; set one with tasks in eval_tasksets")
    modes = [_Mode(SAMPLED, 0, sampled_n, sampling)] if sampled_n > 0 else []
    if greedy:
        modes.append(_Mode(GREEDY, len(modes), 1, replace(sampling, temperature=0.0)))
    if not modes:
        raise UserError("evaluation: nothing to run; set sampled_n to at least 1, or greedy to true")
    return modes


def _warn_of_temperatures(rollouts: RolloutBatch) -> None:
    """Log one warning if calls of the greedy runs set a temperature: a call's own values are kept."""
    others = [row for row in rollouts.rows if row.call.temperature > 0]
    if not others:
        return
    temperatures = sorted({f"{row.call.temperature:g}" for row in others}, key=float)
    _log.warning(
        "taskset %s: %d of %d answers of its greedy runs were sampled at temperature %s, which the agent's calls set, "
        "instead of 0, so metrics of greedy runs are not those of greedy decoding: leave temperature out of these "
        "calls, or set evaluation.greedy to false",
        ", ".join(sorted({row.taskset for row in others})),
        len(others),
        len(rollouts.rows),
        ", ".join(temperatures),
    )


def _judged(
    mode: str,
    rollouts: RolloutBatch,
    tasks: Mapping[str, Task],
    judge: JudgeSpec | None,
    runs: Sequence[RunJudgement],
) -> _Pass:
    last = {row.run_id: row for row in rollouts.rows}  # rows of a run are in step order
    judged = [run for run in runs if run.error is None]
    # A single part of weight 1 equals the reward: it is not reported twice.
    alone = {part.name for part in judge.parts if part.weight == 1} if judge and len(judge.parts) == 1 else set()
    scores, read = [], []
    for run in judged:
        row = last[run.run_id]
        parts = {**row.call.metrics, **{name: value for name, value in run.parts.items() if name not in alone}}
        scores.append(RunScore(row.taskset, run.task_id, mode, run.reward, parts))
        if ORIGIN not in tasks[run.task_id].raw:  # `rft forget` could not erase an imported task from the reports
            read.append(transcript(row, tasks[run.task_id], mode, run.reward))
    return _Pass(scores, read, len(runs) - len(judged), rollouts.report)


def _one_version(report: RolloutReport) -> int:
    if len(report.policy_versions) != 1:
        versions = ", ".join(map(str, report.policy_versions))
        raise EngineError(f"the weights changed during the evaluation (policy versions {versions}): evaluate again")
    return report.policy_versions[0]
