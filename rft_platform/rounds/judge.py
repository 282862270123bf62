"""Judge phase of a round: rewards and advantages for its stored rollouts, by the configured judge or another one."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from pydantic import ValidationError

from rft_platform.config.buffer import Taskset, WeightedJudge
from rft_platform.errors import StorageError, UserError
from rft_platform.experience.quality import (
    JUDGED_COLUMNS,
    ROLLOUT_COLUMNS,
    JudgedQuality,
    RolloutQuality,
    check_judged,
    check_rollouts,
)
from rft_platform.experience.record import TRUNCATED_METRIC, JudgedRow, RolloutRow
from rft_platform.experience.rounds import round_key
from rft_platform.judging.apply import WORKFLOW_REWARD, judge_rollouts
from rft_platform.judging.compose import JudgeSpec, build_judge
from rft_platform.judging.llm.endpoint import EndpointSettings
from rft_platform.judging.session import JudgeState
from rft_platform.rounds.auxiliary import auxiliaries_for_judge
from rft_platform.rounds.mend import refuse_damaged_rows
from rft_platform.rounds.operators import pipeline_of
from rft_platform.rounds.project import Project

NOTE = "judge"

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OtherJudge:
    """A judge that replaces the configured one: a name with arguments, or a weighted list."""

    judge: str | Sequence[WeightedJudge]
    args: Mapping[str, Any] = field(default_factory=dict)


def judge(project: Project, round_number: int, other: OtherJudge | None = None) -> dict[str, Any]:
    """Judge a round's stored rollouts and activate the judgement if it is sound; returns the round's report.

    ``other`` replaces the configured judge. Earlier judgements are kept beside the new one. Raises StorageError if the
    round has no rollouts, and JudgeUnavailableError if a judge model does not answer; nothing is judged then.
    """
    started, store = perf_counter(), project.store
    refuse_damaged_rows(project, round_number, rests_on="explore")
    rows = store.rollout_rows(round_number)
    if not rows:
        raise StorageError(f"{round_key(round_number)} has no rollouts to judge: run explore_job for it first")
    chosen = project.settings.algorithm
    spec, pipeline = judge_of(project, project.taskset, other), pipeline_of(project.settings)
    with auxiliaries_for_judge(project, spec if spec and spec.asks_models else None) as auxiliaries:
        judged = judge_rollouts(
            rows,
            {task.task_id: task for task in project.tasks.tasks},
            spec,
            advantage_fn=chosen.advantage,
            advantage_args=chosen.advantage_args,
            pipeline=pipeline,
            wanted_groups=project.batches.groups_a_round,
            needs_reward=chosen.needs_reward,
            max_abs_reward=project.taskset.max_abs_reward,
            auxiliary_models=auxiliaries,
        )
    version = WORKFLOW_REWARD if spec is None else spec.version
    replaced = _own_rewards(rows) if spec is not None else 0
    if replaced and other is None and not (store.read_note(round_number - 1, NOTE) or {}).get("own_rewards_replaced"):
        LOG.warning(
            "%d runs have a reward of their workflow's own: the judge's counts in its place; set judge: null where the "
            "workflow's is meant",
            replaced,
        )
    store.write_judged(round_number, version, judged.rows, make_current=False)
    rollouts_found, judged_found = quality(project, round_number, version)
    sound = rollouts_found.sound and judged_found.sound and not rollouts_found.incomplete_groups
    if sound:
        store.put_in_force(round_number, version)
    summary = {
        "rows": len(judged.rows),
        "judge_version": version,
        "judge_errors": len(judged.errors),
        **({"own_rewards_replaced": replaced} if replaced else {}),
        **(spec.state.usage.to_note() if spec and spec.state else {}),
        **reward_figures(project, judged.rows, rows, has_advantage=chosen.advantage is not None),
        "operators": [report.as_dict() for report in judged.operators],
        "operators_version": pipeline.version,
        "sound": sound,
        "seconds": perf_counter() - started,
    }
    store.write_note(round_number, NOTE, summary)
    return summary


def other_judge(judge: str, args: Mapping[str, Any], judges: Sequence[Mapping[str, Any]]) -> OtherJudge | None:
    """The judge given by a run's configuration; None if it names none. Raises UserError if it is invalid."""
    if args and not judge:
        raise UserError(f"judge_args {dict(args)!r} without a judge: name the judge that takes them")
    if not judges:
        return OtherJudge(judge, args) if judge else None
    if judge:
        raise UserError("give judge or judges, not both")
    try:
        return OtherJudge([WeightedJudge.model_validate(entry) for entry in judges])
    except ValidationError as error:
        raise UserError(f"judges: expected a list of {{judge, weight, args}}: {error.errors()[0]['msg']}") from error


def judge_spec(
    taskset: Taskset, other: OtherJudge | None = None, models: Mapping[str, str] | None = None
) -> JudgeSpec | None:
    """The judge of a taskset; None if its workflow gives the rewards. ``models`` maps aliases to models."""
    chosen = other or (OtherJudge(taskset.judge, taskset.judge_args) if taskset.judge is not None else None)
    if chosen is None:
        return None
    keys = taskset.format
    return build_judge(
        chosen.judge, chosen.args, answer_key=keys.response_key, prompt_key=keys.prompt_key, models=models
    )


def judge_of(project: Project, taskset: Taskset, other: OtherJudge | None = None) -> JudgeSpec | None:
    """``judge_spec`` for use in a project: with its auxiliary models, its stored judge answers and its time-out."""
    config = project.config
    models = {entry.known_as: entry.identity() for entry in config.explorer.auxiliary_models}
    spec = judge_spec(taskset, other, models)
    if spec is None:
        return None
    state = JudgeState.of(project.home, f"{config.project}/{config.name}")
    return replace(spec, timeout_s=taskset.judge_timeout_s, state=state)


def check_judge(project: Project, taskset: Taskset) -> None:
    """Raise UserError if the judge cannot be built, or if the API key of a judge model is not in the environment."""
    spec = judge_of(project, taskset)
    for part in spec.parts if spec else ():
        model = getattr(part.function, "model", None)
        if isinstance(model, EndpointSettings):
            model.api_key()


def quality(project: Project, round_number: int, judge_version: str) -> tuple[RolloutQuality, JudgedQuality]:
    """The results of the checks on a round's rollouts and on one judgement of them."""
    store = project.store
    rollouts = store.read_rollouts(round_number, columns=ROLLOUT_COLUMNS)
    judged = store.read_judged(round_number, judge_version, columns=JUDGED_COLUMNS)
    policy = project.config.explorer.group_policy
    return check_rollouts(rollouts, project.batches.repeat_times, policy), check_judged(judged, rollouts)


def sample_transcripts(project: Project, round_number: int, count: int = 6) -> str:
    """A few runs of a round as Markdown, from the best reward to the worst."""
    from rft_platform.experience.queries import connect, rollout_transcripts

    with connect(project.store, rounds=[round_number]) as connection:
        runs = rollout_transcripts(connection, round_number, count)
    return "\n\n".join(map(_transcript, runs))


def _transcript(run: dict[str, Any]) -> str:
    answer = run["response"].get("content") or "–"
    reward = "no reward: the judge failed" if run["reward"] is None else f"reward {run['reward']:.2f}"
    return f"**{reward}** · {_last_question(run['messages'])}\n\n> {answer}"


def _last_question(messages: list[dict[str, Any]]) -> str:
    return str(next((message["content"] for message in reversed(messages) if message["role"] == "user"), ""))


def reward_figures(
    project: Project, judged: Sequence[JudgedRow], rows: Sequence[RolloutRow], has_advantage: bool
) -> dict[str, float]:
    """Reward figures of the first policy, and of others as ``<figure>/<name>``. Both lists have the same order."""
    first = _reward_summary(_of_policy(judged, rows, None), has_advantage=has_advantage)
    return {**first, **_further_rewards(project, judged, rows)}


def _of_policy(judged: Sequence[JudgedRow], rows: Sequence[RolloutRow], policy: str | None) -> list[JudgedRow]:
    return [one for one, row in zip(judged, rows, strict=True) if row.policy == policy]


def _further_rewards(project: Project, judged: Sequence[JudgedRow], rows: Sequence[RolloutRow]) -> dict[str, float]:
    """Mean reward and number of rows with a signal, for each policy of section ``policies``."""
    found: dict[str, float] = {}
    for entry in project.config.policies:
        summary = _reward_summary(_of_policy(judged, rows, entry.name), has_advantage=True)
        found |= {f"{name}/{entry.name}": summary[name] for name in ("mean_reward", "rows_with_signal")}
    return found


def _own_rewards(rows: Sequence[RolloutRow]) -> int:
    """Number of runs with a workflow reward for the whole run. Step rewards stay in effect beside a judge's reward."""
    by_steps = {row.run_id for row in rows if row.step_reward is not None}
    rewarded = {row.run_id for row in rows if row.run_reward is not None and TRUNCATED_METRIC not in row.metrics}
    return len(rewarded - by_steps)


def _reward_summary(rows: Sequence[JudgedRow], has_advantage: bool) -> dict[str, float]:
    """Reward over runs (all rows of a run have the run's reward), and the number of rows with a signal.

    The reward includes runs that a filter keeps from training, because it measures the policy. If no advantages are
    computed yet, every row that is not dropped counts as having a signal.
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
