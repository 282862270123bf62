"""Judge runs, and turn the judgements into judged rows with advantages."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft_platform.algorithms.advantages.registry import ADVANTAGES, compute_advantages
from rft_platform.common.errors import NAMED, StorageError, UserCodeError, UserError
from rft_platform.common.files import digest_json
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.home import Home
from rft_platform.config.schema.buffer import MAX_ABS_REWARD
from rft_platform.experience.record import POLICY_REWARD, TRUNCATED_METRIC, JudgedRow, RolloutRow, valid_text
from rft_platform.experience.responses import ResponseDecoder
from rft_platform.judging.execution.compose import JudgeSpec
from rft_platform.judging.execution.experience_pipeline import (
    JUDGED,
    OperatorReport,
    Pipeline,
    RunMetrics,
    experiences_of,
    last_rows,
    metrics_of_runs,
    parts_of,
)
from rft_platform.judging.execution.judge_executor import RunToJudge, Verdict, judge_all
from rft_platform.judging.judge_context import JudgeState
from rft_platform.judging.judged_run import judged_run
from rft_platform.judging.types import RunJudgement, declared_responses, refuse_beyond
from rft_platform.tasks.task import Task

JUDGE_ERROR = "judge_error"  #: ``dropped_by`` of the rows of a run on which its judge failed
GREEDY_BASELINE = "greedy_baseline"  #: ``dropped_by`` of the rows of greedy runs that are only a baseline
WORKFLOW_REWARD = "workflow"  #: ``judge_version`` of rewards that the workflow itself set

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgedRollouts:
    """Judged rows in the order of the rollout rows, and the judgement of each run."""

    rows: list[JudgedRow]
    runs: list[RunJudgement]
    operators: tuple[OperatorReport, ...] = ()  # what each operator of the pipeline did

    @property
    def errors(self) -> list[RunJudgement]:
        """The runs on which the judge failed."""
        return [run for run in self.runs if run.error is not None]


@dataclass(frozen=True, slots=True)
class TasksetJudge:
    """How the runs of a taskset are judged."""

    spec: JudgeSpec | None  # None: the workflow gives the reward
    max_abs_reward: float | None = MAX_ABS_REWARD


def version_of(judges: Mapping[str, TasksetJudge], workflow_version: str) -> str:
    """The version of the judges of all tasksets; ``workflow_version`` stands for a taskset without a judge."""
    versions = {name: workflow_version if each.spec is None else each.spec.version for name, each in judges.items()}
    return next(iter(versions.values())) if len(versions) == 1 else digest_json(versions)[:16]


def name_of(judges: Mapping[str, TasksetJudge]) -> str:
    """The judges' names, with the tasksets' names if there are several tasksets."""
    names = {name: WORKFLOW_REWARD if each.spec is None else each.spec.name for name, each in judges.items()}
    if len(names) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{taskset}: {judge}" for taskset, judge in names.items())


def usage_of(judges: Mapping[str, TasksetJudge]) -> dict[str, int]:
    """The requests to models that the judges made, with the names that a round's note uses. They share their counts."""
    states = (each.spec.state for each in judges.values() if each.spec is not None)
    return next((state.usage.to_note() for state in states if state is not None), {})


def judge_tasksets(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judges: Mapping[str, TasksetJudge],
    *,
    needs_reward: bool = True,
    auxiliary_models: Mapping[str, Any] | None = None,
) -> list[RunJudgement]:
    """Like ``judge_runs``, with a judge for each taskset, by its name. A single judge judges the rows of any taskset.

    If no run of a taskset gets a reward, this is logged; UserCodeError is raised if no run of any taskset gets one.
    Raises StorageError if a row's taskset has no judge.
    """
    settings: Any = {"needs_reward": needs_reward, "auxiliary_models": auxiliary_models}
    if len(judges) == 1:
        (only,) = judges.values()
        return judge_runs(rows, tasks, only.spec, max_abs_reward=only.max_abs_reward, **settings)
    by_taskset: dict[str, list[RolloutRow]] = {}
    for row in rows:
        by_taskset.setdefault(row.taskset, []).append(row)
    if unknown := sorted(by_taskset.keys() - judges.keys()):
        raise StorageError(f"the rows are of taskset {unknown[0]!r}; the configuration has {', '.join(judges)}")
    found: dict[str, RunJudgement] = {}
    faults = []
    for name, own in by_taskset.items():
        runs, fault = _judgements(own, tasks, judges[name], **settings)
        found |= {run.run_id: run for run in runs}
        faults += [] if fault is None else [f"taskset {name!r}: {fault}"]
    if faults and len(faults) == len(by_taskset):
        raise UserCodeError("; ".join(faults[:NAMED]))
    for fault in faults:
        _log.warning("%s; the runs of this taskset are excluded", fault)
    return [found[name] for name in dict.fromkeys(row.run_id for row in rows)]


def judge_runs(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judge: JudgeSpec | None,
    *,
    needs_reward: bool = True,
    max_abs_reward: float | None = MAX_ABS_REWARD,
    auxiliary_models: Mapping[str, Any] | None = None,
) -> list[RunJudgement]:
    """Judge every run; return the judgements in the order in which the runs first appear in ``rows``.

    The judge gets the task's dataset row and the response that the workflow returned, or else the text of the run's
    last answer. A response object keeps its class if the annotation of the judge's ``response`` names that class; else
    it becomes plain values. Without a judge the workflow's own reward counts; if ``needs_reward`` is False, a run
    without a reward gets 0. A function that is not ``async`` runs in its own thread. A run gets no reward if the judge
    fails on the run or takes longer than the judge's ``timeout_s``, or if the reward is further from 0 than
    ``max_abs_reward``. A run that exceeded the context before its workflow returned is not judged: it keeps its
    ``truncated_reward``.

    Raises:
        StorageError: the task of a row is not in ``tasks``.
        UserError: there is neither a judge nor a reward from the workflow, or the judge cannot be called (key, budget).
        UserCodeError: the judge failed on every run that it judged, or no reward is finite and within
            ``max_abs_reward``.
        JudgeUnavailableError: a judge model does not answer; then no run gets a reward.
    """
    runs, fault = _judgements(
        rows,
        tasks,
        TasksetJudge(judge, max_abs_reward),
        needs_reward=needs_reward,
        auxiliary_models=auxiliary_models,
    )
    if fault is not None:
        raise UserCodeError(fault)
    return runs


def _judgements(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    how: TasksetJudge,
    *,
    needs_reward: bool,
    auxiliary_models: Mapping[str, Any] | None,
) -> tuple[list[RunJudgement], str | None]:
    """Judge every run; the second value tells why the round must stop, None if it need not."""
    ends, judge = last_rows(rows), how.spec
    for row in ends:
        if row.task_id not in tasks:
            raise StorageError(f"run {row.run_id}: task {row.task_id} is not in the taskset of this judgement")
    if judge is None:
        return refuse_beyond([_own_reward(row, needs_reward) for row in ends], how.max_abs_reward)
    rows_of_run: dict[str, list[RolloutRow]] = {}
    for row in rows:
        rows_of_run.setdefault(row.run_id, []).append(row)
    completed = [row for row in ends if not _is_cut_off(row)]
    decoder = ResponseDecoder(kind for part in judge.parts for kind in declared_responses(part.function))
    runs = [_to_judge(row, rows_of_run[row.run_id], tasks[row.task_id], decoder) for row in completed]
    for name, reason in list(decoder.left_plain.items())[:NAMED]:
        _log.warning(
            "responses of class %r are judged as plain values: %s. To get the objects, annotate the judge's parameter "
            "`response` with the class",
            name,
            reason,
        )
    state = judge.state or JudgeState.of(Home.from_environment())
    verdicts = judge_all(runs, judge, state, auxiliary_models or {}) if runs else []
    judged = {row.run_id: _judgement(row, verdict) for row, verdict in zip(completed, verdicts, strict=True)}
    judgements = [judged.get(row.run_id) or _own_reward(row, needs_reward) for row in ends]
    failed = [judgement for judgement in judged.values() if judgement.error]
    if failed and len(failed) == len(judged):
        runs_of = "the only run" if len(judged) == 1 else f"all {len(judged)} runs"
        if cut_off := len(ends) - len(judged):
            runs_of += f" that it judged ({cut_off} exceeded the context)"
        first = "" if len(judged) == 1 else "; the first"
        return judgements, f"the judge failed on {runs_of}{first}: {failed[0].error}"
    if failed:
        first = f"run {failed[0].run_id} (task {failed[0].task_id}): {failed[0].error}"
        _log.warning(
            "the judge failed on %d of %d runs, which are excluded; the first: %s", len(failed), len(ends), first
        )
    return refuse_beyond(judgements, how.max_abs_reward)


def judge_rollouts(
    rows: Sequence[RolloutRow],
    tasks: Mapping[str, Task],
    judge: JudgeSpec | Mapping[str, TasksetJudge] | None,
    *,
    advantage_fn: str | None,
    advantage_args: Mapping[str, Any] | None = None,
    pipeline: Pipeline | None = None,
    wanted_groups: int | None = None,
    needs_reward: bool = True,
    max_abs_reward: float | None = MAX_ABS_REWARD,
    auxiliary_models: Mapping[str, Any] | None = None,
    workflow_version: str = WORKFLOW_REWARD,
) -> JudgedRollouts:
    """Judge every run, apply the operators, and give each row its reward and advantage.

    ``judge`` is one judge, for which ``max_abs_reward`` holds, or the judges of several tasksets by name. If several
    policies took part in the runs, each row gets the reward of the row's policy. Operators and advantages are applied
    to each policy's rows separately: rows of different policies are never compared. The metrics of a run are the same
    for each of its policies.

    Rows of runs on which the judge failed have reward NaN, ``judge_error`` and ``dropped_by``. These runs, and runs
    that an operator of the ``pipeline`` drops, do not count in the advantages of their group. ``wanted_groups`` is the
    number of groups that the round should train on. If ``advantage_fn`` is None (the algorithm has no such function),
    every advantage is 0. ``workflow_version`` is stored as the judge version if there is no judge and the workflow set
    the rewards. Raises the errors of ``judge_runs`` and ``Pipeline.apply``.
    """
    judges = judge if isinstance(judge, Mapping) else {"": TasksetJudge(judge, max_abs_reward)}
    runs = judge_tasksets(rows, tasks, judges, needs_reward=needs_reward, auxiliary_models=auxiliary_models)
    version = version_of(judges, workflow_version)
    stage = _AdvantageStage(
        advantage_fn, advantage_args or {}, pipeline or Pipeline(), wanted_groups, version, metrics_of_runs(rows)
    )
    by_policy: dict[str, list[RolloutRow]] = {} if rows else {DEFAULT_POLICY: []}
    for row in rows:
        by_policy.setdefault(row.call.policy, []).append(row)
    parts = {}
    for policy, own in by_policy.items():
        took_part = {row.run_id for row in own}
        parts[policy] = stage.judged(own, [run.of_policy(policy) for run in runs if run.run_id in took_part], policy)
    return _joined(rows, parts)


@dataclass(frozen=True, slots=True)
class _AdvantageStage:
    """Turns judgements into rows with rewards and advantages."""

    advantage_fn: str | None
    advantage_args: Mapping[str, Any]
    pipeline: Pipeline
    wanted_groups: int | None
    version: str
    metrics: RunMetrics

    def judged(self, rows: Sequence[RolloutRow], runs: list[RunJudgement], policy: str) -> JudgedRollouts:
        """Return the judged rows of one policy, with rewards and advantages."""
        runs, out, reports = self._processed(rows, runs)
        if self.advantage_fn is not None and ADVANTAGES.get(self.advantage_fn).greedy_run:
            greedy = {row.row_id: GREEDY_BASELINE for row in rows if row.call.temperature == 0}
            out = _LeftOut({**greedy, **out.rows}, out.runs)
        by_run = {run.run_id: run for run in runs}
        advantages = self._advantages([row for row in rows if row.run_id not in out.runs], by_run, out)
        judged = [_judged(row, by_run[row.run_id], advantages.get(row.row_id, 0.0), self.version, out) for row in rows]
        if policy != DEFAULT_POLICY:
            reports = tuple(replace(report, name=f"{report.name} ({policy})") for report in reports)
        return JudgedRollouts(judged, runs, reports)

    def _processed(
        self, rows: Sequence[RolloutRow], runs: list[RunJudgement]
    ) -> tuple[list[RunJudgement], "_LeftOut", tuple[OperatorReport, ...]]:
        """Apply the pipeline; return the runs with their final rewards, what is left out, and the operator reports."""
        failed = {run.run_id for run in runs if run.error is not None}
        sound = [run for run in runs if run.error is None]
        judged = [row for row in rows if row.run_id not in failed]
        done = self.pipeline.apply(experiences_of(judged, sound, self.wanted_groups, self.metrics))
        after = done.experiences
        changed = bool((after.reward_R != after.judged_R).any())
        made = {
            run.run_id: replace(
                run,
                reward=float(after.reward_R[index]),
                parts=parts_of(after, index) | ({JUDGED: run.reward} if changed else {}),
            )
            for index, run in enumerate(sound)
        }
        why = {row.row_id: JUDGE_ERROR for row in rows if row.run_id in failed}
        why |= {row.row_id: name for row, name in zip(judged, done.dropped_N, strict=True) if name is not None}
        gone = failed | {run.run_id for run, kept in zip(sound, after.kept_R, strict=True) if not kept}
        return [made.get(run.run_id, run) for run in runs], _LeftOut(why, frozenset(gone)), done.reports

    def _advantages(
        self, kept: Sequence[RolloutRow], by_run: Mapping[str, RunJudgement], out: "_LeftOut"
    ) -> dict[str, float]:
        """Advantages by row id; rows that are left out are missing."""
        if self.advantage_fn is None or not kept:
            return {}
        values = compute_advantages(
            self.advantage_fn,
            [by_run[row.run_id].reward for row in kept],
            [row.group_id for row in kept],
            [row.run_id for row in kept],
            [row.step for row in kept],
            columns={
                "env_state_hash": [row.call.env_state_hash for row in kept],
                "step_reward": [row.call.step_reward for row in kept],
                "temperature": [row.call.temperature for row in kept],
            },
            **self.advantage_args,
        )
        made = zip((row.row_id for row in kept), values.tolist(), strict=True)
        return {row: value for row, value in made if row not in out.rows}


def _joined(rows: Sequence[RolloutRow], parts: Mapping[str, JudgedRollouts]) -> JudgedRollouts:
    """Join the judged rows of all policies, in the order of ``rows``.

    A run with rows of several policies has the judgement of its first policy.
    """
    by_row = {row.row_id: row for part in parts.values() for row in part.rows}
    first_last = sorted(parts, key=lambda policy: policy == DEFAULT_POLICY)
    runs = {run.run_id: run for policy in first_last for run in parts[policy].runs}
    in_order = [runs[name] for name in dict.fromkeys(row.run_id for row in rows)]
    reports = tuple(report for part in parts.values() for report in part.operators)
    return JudgedRollouts([by_row[row.row_id] for row in rows], in_order, reports)


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """Rows that are not trained on, with the reason, and runs that do not count in their group."""

    rows: Mapping[str, str]
    runs: frozenset[str]


def _judged(row: RolloutRow, run: RunJudgement, advantage: float, version: str, out: _LeftOut) -> JudgedRow:
    dropped_by = out.rows.get(row.row_id)
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
        masked=dropped_by is not None and row.run_id not in out.runs,
        judge_error=run.error,
    )


def _is_cut_off(row: RolloutRow) -> bool:
    """Whether the run that ended with ``row`` exceeded the context, so that its workflow returned nothing."""
    return TRUNCATED_METRIC in row.call.metrics and row.run_output is None


def _own_reward(row: RolloutRow, needs_reward: bool) -> RunJudgement:
    if row.run_reward is None:
        if not needs_reward:
            return RunJudgement(row.run_id, row.task_id, 0.0)
        raise UserError(
            f"task {row.task_id} of taskset {row.taskset!r}: run {row.run_id} has no reward. Give the taskset a judge, "
            "or let its workflow return WorkflowOutput(reward=...)"
        )
    if not math.isfinite(row.run_reward):
        return _failed(row, f"the reward is {row.run_reward}; expected a finite number")
    rewards_by_name = {name: value for name, value in row.call.metrics.items() if name.startswith(POLICY_REWARD)}
    rewards = {name.removeprefix(POLICY_REWARD): value for name, value in rewards_by_name.items()}
    return RunJudgement(row.run_id, row.task_id, row.run_reward, rewards=rewards)


def _to_judge(last: RolloutRow, rows: Sequence[RolloutRow], task: Task, decoder: ResponseDecoder) -> RunToJudge:
    """Return what judges see of the run that ``rows`` record; ``last`` holds its output."""
    document = last.run_output
    response = last.call.response.get("content") if document is None else decoder.decode(document)
    return RunToJudge(last.group_id, task.raw, response, judged_run(rows), document)


def _judgement(row: RolloutRow, verdict: Verdict) -> RunJudgement:
    if verdict.error is not None:
        return _failed(row, verdict.error)
    return RunJudgement(row.run_id, row.task_id, verdict.reward, verdict.parts, rewards=verdict.rewards)


def _failed(row: RolloutRow, error: str) -> RunJudgement:
    return RunJudgement(row.run_id, row.task_id, math.nan, {}, valid_text(error))
