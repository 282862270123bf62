"""Judge stage of a round: rewards and advantages for its stored rollouts, by the configured judge or another one.

Judgements of other judge versions are kept, and so is one that a training has read: ``figures`` reads the one in force,
``restore`` puts an earlier one in force again.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import pyarrow as pa

from rft_platform.common.errors import PrerequisiteError, UserError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.file_names import round_key
from rft_platform.experience.quality import (
    JUDGED_COLUMNS,
    ROLLOUT_COLUMNS,
    JudgedQuality,
    RolloutQuality,
    check_judged,
    check_rollouts,
)
from rft_platform.experience.record import REWARD_ROUNDING, TRUNCATED_METRIC, JudgedRow, RolloutRow
from rft_platform.experience.schema import judged_to_table
from rft_platform.experience.store import ExperienceStore
from rft_platform.experience.transcripts import rollout_transcripts
from rft_platform.judging.execution.judge_rollouts import (
    JUDGE_ERROR,
    WORKFLOW_REWARD,
    TasksetJudge,
    judge_rollouts,
    name_of,
    usage_of,
    version_of,
)
from rft_platform.rounds.project.code_version import keep_user_code
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import BY_MODEL, Explored, Judged, read, write
from rft_platform.rounds.project.repair import refuse_damaged_rows
from rft_platform.rounds.reporting.reward_audit import run_signals
from rft_platform.rounds.setup.algorithm import pipeline_of
from rft_platform.rounds.setup.side_engines import auxiliaries_for_judges
from rft_platform.rounds.setup.taskset_binding import OtherJudge, judges_of
from rft_platform.tasks.task import ORIGIN, Task

LOG = logging.getLogger(__name__)


PASS_REWARD = 1.0
_OF_EVERY_POLICY = ("mean_reward", "rows_with_signal")


@dataclass(frozen=True, slots=True)
class JudgementFigures:
    """Figures of one judgement of a round."""

    round: int
    judge_version: str
    judge: str  # its name; empty if the note that names it was lost
    runs: int  # with a reward
    failed: int  # runs for which the judge failed
    dropped_rows: int  # rows that an operator keeps from training
    mean_reward: float | None
    pass_rate: float | None  # fraction of rewarded runs with a reward of 1 or more


def judge(project: Project, round_number: int, other: OtherJudge | None = None) -> Judged:
    """Judge a round's stored rollouts, put the judgement in force if it is sound; returns the round's report.

    ``other`` replaces the configured judge. Judgements of other judge versions are kept beside the new one. Raises
    PrerequisiteError if the round has no rollouts, JudgeUnavailableError if a judge model does not answer, and
    UserError if the judgement would replace a different one that a training has read; nothing is stored then.
    """
    started, store = perf_counter(), project.store
    refuse_damaged_rows(store, round_number, Explored)
    rows = store.rollout_rows(round_number)
    if not rows:
        raise PrerequisiteError(f"{round_key(round_number)} has no rollouts to judge: run explore_job for it first")
    chosen = project.settings.algorithm
    judges, pipeline = judges_of(project, other), pipeline_of(project.settings)
    record = read(store, round_number)
    version = version_of(judges, workflow_version := _workflow_version(record.explored))
    with auxiliaries_for_judges(project, judges) as auxiliaries:
        judged = judge_rollouts(
            rows,
            _tasks_of_traffic(rows) if project.traffic is not None else project.tasks.by_id(),
            judges,
            advantage_fn=chosen.advantage,
            advantage_args=chosen.advantage_args,
            pipeline=pipeline,
            wanted_groups=project.batches.groups_a_round,
            needs_reward=chosen.needs_reward,
            auxiliary_models=auxiliaries,
            workflow_version=workflow_version,
        )
    replaced = _own_rewards(rows, judges)
    if replaced and other is None:
        _warn_of_replaced_rewards(replaced, read(store, round_number - 1).judged)
    if not _is_read(project, round_number, version, judged.rows):
        store.write_judged(round_number, version, judged.rows, make_current=False)
    rollouts_found, judged_found = quality(project, round_number, version)
    if sound := _may_be_in_force(rollouts_found, judged_found):
        store.put_in_force(round_number, version)
    earlier, seconds = record.judged or Judged(), perf_counter() - started
    made = replace(
        _report(project, version, rows, judged.rows, judges, judged_found),
        sound=sound,
        judge_names={**earlier.judge_names, version: name_of(judges)},
        judge_kinds={**earlier.judge_kinds, version: _kind_of(judges)},
        judge_codes={**earlier.judge_codes, version: keep_user_code(project, *_named_by(other))},
        judge_operators={**earlier.judge_operators, version: pipeline.version},
        judge_seconds={version: seconds, **_seconds_of(earlier)},
        own_rewards_replaced=replaced or None,
        operators=list(judged.operators),
        operators_version=pipeline.version,
        seconds=seconds,
    )
    write(store, round_number, made)
    return made


def _report(
    project: Project,
    version: str,
    rows: Sequence[RolloutRow],
    judged: Sequence[JudgedRow],
    judges: Mapping[str, TasksetJudge],
    found: JudgedQuality,
) -> Judged:
    """What the rows of a judgement tell about it. ``judges``: empty for an earlier one, whose judges are not known."""
    figures = reward_figures(project, judged, rows, has_advantage=project.settings.algorithm.advantage is not None)
    return Judged(
        judge_version=version,
        rows=len(judged),
        mean_reward=figures.pop("mean_reward"),
        judge_errors=len({row.run_id for row in judged if row.dropped_by == JUDGE_ERROR}),
        figures={
            **usage_of(judges),
            **figures,
            "equal_groups": found.zero_variance_share,
            **run_signals(rows, judged, judges),
            **run_metrics(rows, judged),
            **_taskset_rewards(project, rows, judged),
        },
    )


def _kind_of(judges: Mapping[str, TasksetJudge]) -> str:
    """``model`` if a judge asks a model, else ``code``."""
    specs = [each.spec for each in judges.values() if each.spec is not None]
    asks = any(spec.asks_models or any(part.settings is not None for part in spec.parts) for spec in specs)
    return BY_MODEL if asks else "code"


def _is_read(project: Project, round_number: int, version: str, rows: Sequence[JudgedRow]) -> bool:
    """Whether a training has read a stored judgement of ``version``, whose file then stays.

    Raises UserError if the new one differs in more than the texts of its errors, which may name times and addresses.
    """
    stored = _by_row(project.store.read_judged(round_number, version))
    training = _training_on(project, round_number, version) if stored else None
    if training is None:
        return False
    new = _by_row(judged_to_table(rows))
    if changed := sum(stored.get(name) != new.get(name) for name in stored.keys() | new.keys()):
        raise UserError(
            f"the training of {round_key(training)} read judgement {version} of {round_key(round_number)}; the judge "
            f"has the same version and judges {changed:,} of {len(new):,} rows differently now: nothing was stored. "
            "Give it another version (other --args or other code), use another judge, or, if its model failed for some "
            "runs, judge again later"
        )
    return True


def _seconds_of(earlier: Judged) -> dict[str, float]:
    """The time that each judgement of a round took, by judge version."""
    seconds = earlier.seconds_of(earlier.judge_version)
    return {**earlier.judge_seconds, **({} if seconds is None else {earlier.judge_version: seconds})}


def _by_row(table: pa.Table) -> dict[str, dict[str, Any]]:
    return {row["row_id"]: row for row in table.drop_columns("judge_error").to_pylist()}


def _training_on(project: Project, round_number: int, version: str) -> int | None:
    """The first round whose training of any policy read the round's rows with this judgement, both as they are now.

    In the dynamic styles a training may read rows of rounds with higher numbers.
    """
    now = project.store.digest(round_number, judge_version=version)
    for number in project.store.rounds():
        record = read(project.store, number)
        for name in project.policies:
            trained = record.trained(name)
            settled = {} if trained is None else trained.lineage.get("row_selection") or {}
            if settled.get("digests", {}).get(str(round_number)) == now:
                return number
    return None


def _warn_of_replaced_rewards(replaced: int, before: Judged | None) -> None:
    """Warn once, not again in a round that follows one with replaced rewards."""
    if not (before and before.own_rewards_replaced):
        LOG.warning(
            "%d runs have a reward from their workflow, and the judge's reward replaces it; set judge: null "
            "to use the workflow's reward",
            replaced,
        )


def _workflow_version(explored: Explored | None) -> str:
    """The judge version of rewards that the workflow set: it names the user's code that explored."""
    code = None if explored is None else explored.workflow_code
    return WORKFLOW_REWARD if code is None else f"{WORKFLOW_REWARD}-{code}"


def _named_by(other: OtherJudge | None) -> list[Any]:
    """The settings of a judge that replaces the configured one."""
    if other is None:
        return []
    judges = other.judge if isinstance(other.judge, str) else [entry.model_dump() for entry in other.judge]
    return [judges, dict(other.args)]


def _tasks_of_traffic(rows: Sequence[RolloutRow]) -> dict[str, Task]:
    """The tasks of an online round's rows, by task id. A judge gets the messages of a task's first request as the task.

    The tasks are made from the requests, because no dataset holds them.
    """
    tasks: dict[str, Task] = {}
    for row in rows:
        messages = row.call.messages
        prompt = next((str(each.get("content")) for each in reversed(messages) if each.get("role") == "user"), "")
        tasks.setdefault(row.task_id, Task(row.task_id, row.taskset, prompt, None, {"messages": messages}))
    return tasks


def quality(project: Project, round_number: int, judge_version: str) -> tuple[RolloutQuality, JudgedQuality]:
    """The results of the checks on a round's rollouts and on one judgement of them."""
    store = project.store
    rollouts = store.read_rollouts(round_number, columns=ROLLOUT_COLUMNS)
    judged = store.read_judged(round_number, judge_version, columns=JUDGED_COLUMNS)
    policy = project.config.explorer.group_policy
    repeat_times = None if project.traffic is not None else project.batches.repeat_times  # production traffic decides
    return check_rollouts(rollouts, repeat_times, policy), check_judged(judged, rollouts)


def _may_be_in_force(rollouts: RolloutQuality, judged: JudgedQuality) -> bool:
    """Whether the blocking checks pass, so that training may use the judgement."""
    return rollouts.sound and judged.sound and not rollouts.incomplete_groups


def may_be_shown(project: Project) -> bool:
    """Whether Dagster may keep texts of rows: those of traffic and of imported tasks could not be erased there."""
    return project.traffic is None and not any(ORIGIN in task.raw for task in project.tasks.tasks)


def sample_transcripts(project: Project, round_number: int, count: int = 6) -> str:
    """A few runs of a round as Markdown, from the best reward to the worst."""
    return "\n\n".join(map(_transcript, rollout_transcripts(project.store, round_number, count)))


def _transcript(run: dict[str, Any]) -> str:
    answer = run["response"].get("content") or "–"
    reward = "no reward: the judge failed" if run["reward"] is None else f"reward {run['reward']:.2f}"
    return f"**{reward}** · {_last_question(run['messages'])}\n\n> {answer}"


def _last_question(messages: list[dict[str, Any]]) -> str:
    return str(next((message["content"] for message in reversed(messages) if message["role"] == "user"), ""))


def reward_figures(
    project: Project, judged: Sequence[JudgedRow], rows: Sequence[RolloutRow], has_advantage: bool
) -> dict[str, float]:
    """Reward figures of the default policy, and some of the further policies as ``<figure>/<name>``.

    ``judged`` and ``rows`` are in the same order.
    """
    found: dict[str, float] = {}
    for name in project.policies:
        own = [one for one, row in zip(judged, rows, strict=True) if row.call.policy == name]
        summary = _reward_summary(own, has_advantage)
        shown = summary if name == DEFAULT_POLICY else _OF_EVERY_POLICY
        found |= {figure if name == DEFAULT_POLICY else f"{figure}/{name}": summary[figure] for figure in shown}
    return found


def run_metrics(rows: Sequence[RolloutRow], judged: Sequence[JudgedRow]) -> dict[str, dict[str, float]]:
    """Means over the runs, by name: ``workflow_metrics`` that the workflow reported, ``judge_metrics`` of the judge.

    A run that did not report a value is left out of its mean. ``rows`` and ``judged`` are in the same order.
    """
    workflow, judge = dict[str, Mapping[str, float]](), dict[str, Mapping[str, float]]()
    for row, one in zip(rows, judged, strict=True):  # the last row of a run has the run's metrics
        workflow[row.run_id] = {**workflow.get(row.run_id, {}), **row.call.metrics}
        judge[row.run_id] = one.reward_parts
    return {"workflow_metrics": _means(list(workflow.values())), "judge_metrics": _means(list(judge.values()))}


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for each in values:
        for name, value in each.items():
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(found.items())}


def _taskset_rewards(
    project: Project, rows: Sequence[RolloutRow], judged: Sequence[JudgedRow]
) -> dict[str, dict[str, float]]:
    """``taskset_rewards``: the mean reward of the runs of each taskset, if several are explored. One order of rows."""
    if len(project.tasksets) == 1:
        return {}
    found: dict[str, dict[str, float]] = {}
    for row, one in zip(rows, judged, strict=True):
        if row.call.policy == DEFAULT_POLICY and math.isfinite(one.reward):
            found.setdefault(row.taskset, {})[row.run_id] = one.reward
    return {"taskset_rewards": {name: sum(runs.values()) / len(runs) for name, runs in sorted(found.items())}}


def _own_rewards(rows: Sequence[RolloutRow], judges: Mapping[str, TasksetJudge]) -> int:
    """Number of runs whose workflow set a reward for the whole run, which a judge's reward replaces.

    Runs with rewards for steps do not count: a judge's reward does not replace them.
    """
    if len(judges) == 1:
        rows = rows if all(each.spec is not None for each in judges.values()) else []
    else:
        rows = [row for row in rows if judges[row.taskset].spec is not None]
    by_steps = {row.run_id for row in rows if row.call.step_reward is not None}
    rewarded = {row.run_id for row in rows if row.run_reward is not None and TRUNCATED_METRIC not in row.call.metrics}
    return len(rewarded - by_steps)


def _reward_summary(rows: Sequence[JudgedRow], has_advantage: bool) -> dict[str, float]:
    """Reward over runs (all rows of a run have the run's reward), and the number of rows with a signal.

    The reward measures the policy, so it includes runs that a filter keeps from training. Without advantages
    (``has_advantage`` is False) every row that is not dropped counts as having a signal.
    """
    last = {row.run_id: row.reward for row in rows if math.isfinite(row.reward)}
    rewards = list(last.values())
    return {
        "runs": len(rewards),
        "mean_reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "max_reward": max(rewards, default=0.0),
        "min_reward": min(rewards, default=0.0),
        "dropped_rows": sum(row.dropped_by is not None for row in rows),
        "rows_with_signal": sum(row.dropped_by is None and (row.advantage != 0.0 or not has_advantage) for row in rows),
    }


def figures(store: ExperienceStore, round_number: int) -> JudgementFigures | None:
    """Figures of the judgement in force; None before the first."""
    version = store.judge_version(round_number)
    if version is None:
        return None
    table = store.read_judged(round_number, version, columns=["run_id", "reward", "dropped_by"]).to_pylist()
    failed = {row["run_id"] for row in table if row["dropped_by"] == JUDGE_ERROR}
    rewards = {row["run_id"]: row["reward"] for row in table if row["run_id"] not in failed}
    found = [reward for reward in rewards.values() if reward is not None and math.isfinite(reward)]
    return JudgementFigures(
        round=round_number,
        judge_version=version,
        judge=(read(store, round_number).judged or Judged()).judge_names.get(version, ""),
        runs=len(found),
        failed=len(failed),
        dropped_rows=sum(row["dropped_by"] not in (None, JUDGE_ERROR) for row in table),
        mean_reward=sum(found) / len(found) if found else None,
        pass_rate=sum(reward >= PASS_REWARD - REWARD_ROUNDING for reward in found) / len(found) if found else None,
    )


def restore(project: Project, round_number: int, version: str) -> Judged:
    """Put a stored judgement in force again.

    Raises UserError if the judgement is not stored, or if it would fail a blocking check.
    """
    started, store = perf_counter(), project.store
    known = store.judge_versions(round_number)
    if version not in known:
        raise UserError(
            f"{round_key(round_number)} has no judgement {version!r}; it has {', '.join(known) or 'none'}: give one of "
            "them"
        )
    rollouts_found, judged_found = quality(project, round_number, version)
    if not _may_be_in_force(rollouts_found, judged_found):
        raise UserError(
            f"judgement {version} of {round_key(round_number)} would fail a blocking check (`rft ui` shows the checks "
            "of the judgement): restore another judgement, or correct the cause and judge the round again"
        )
    by_row = {row.row_id: row for row in store.judged_rows(round_number, version)}
    rows = store.rollout_rows(round_number)
    judged = [by_row[row.row_id] for row in rows]
    earlier = read(store, round_number).judged or Judged()
    restored = replace(
        _report(project, version, rows, judged, {}, judged_found),
        sound=True,
        judge_names=earlier.judge_names,
        judge_kinds=earlier.judge_kinds,
        judge_codes=earlier.judge_codes,
        judge_operators=earlier.judge_operators,
        judge_seconds=_seconds_of(earlier),
        operators_version=earlier.judge_operators.get(version),
        restored=True,
        seconds=perf_counter() - started,
    )
    store.put_in_force(round_number, version)
    write(store, round_number, restored)
    return restored
