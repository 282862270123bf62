"""Judge stage of a round: rewards and advantages for its stored rollouts, by the configured judge or another one.

Earlier judgements are kept: ``figures`` reads the active one, ``restore`` activates an earlier one again.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.policy_names import FIRST_POLICY, stored_name
from rft_platform.experience.file_names import round_key
from rft_platform.experience.quality import (
    JUDGED_COLUMNS,
    ROLLOUT_COLUMNS,
    JudgedQuality,
    RolloutQuality,
    check_judged,
    check_rollouts,
)
from rft_platform.experience.record import TRUNCATED_METRIC, JudgedRow, RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.judge_rollouts import (
    JUDGE_ERROR,
    WORKFLOW_REWARD,
    TasksetJudge,
    judge_rollouts,
    name_of,
    usage_of,
    version_of,
)
from rft_platform.rounds.project.code_version import JUDGE_CODES, judge_codes, keep_user_code, workflow_code
from rft_platform.rounds.project.notes import JUDGE
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.repair import refuse_damaged_rows
from rft_platform.rounds.selection.production_rows import tasks_of_traffic
from rft_platform.rounds.setup.algorithm import pipeline_of
from rft_platform.rounds.setup.side_engines import auxiliaries_for_judges
from rft_platform.rounds.setup.taskset_binding import OtherJudge, judges_of

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


def judge(project: Project, round_number: int, other: OtherJudge | None = None) -> dict[str, Any]:
    """Judge a round's stored rollouts and activate the judgement if it is sound; returns the round's report.

    ``other`` replaces the configured judge. Earlier judgements are kept beside the new one. Raises StorageError if the
    round has no rollouts, and JudgeUnavailableError if a judge model does not answer; nothing is judged then.
    """
    started, store = perf_counter(), project.store
    refuse_damaged_rows(project, round_number, needed_note="explore")
    rows = store.rollout_rows(round_number)
    if not rows:
        raise StorageError(f"{round_key(round_number)} has no rollouts to judge: run explore_job for it first")
    chosen = project.settings.algorithm
    judges, pipeline = judges_of(project, other), pipeline_of(project.settings)
    version = version_of(judges, workflow_version := _workflow_version(store, round_number))
    with auxiliaries_for_judges(project, judges) as auxiliaries:
        judged = judge_rollouts(
            rows,
            tasks_of_traffic(rows) if project.config.online else project.tasks.by_id(),
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
    if replaced and other is None and not (store.read_note(round_number - 1, JUDGE) or {}).get("own_rewards_replaced"):
        LOG.warning(
            "%d runs have a reward from their workflow, and the judge's reward replaces it; set judge: null "
            "to use the workflow's reward",
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
        "judge_names": {**_judge_names(store, round_number), version: name_of(judges)},
        "judge_errors": len(judged.errors),
        **({"own_rewards_replaced": replaced} if replaced else {}),
        **usage_of(judges),
        **reward_figures(project, judged.rows, rows, has_advantage=chosen.advantage is not None),
        **run_metrics(rows, judged.rows),
        **_taskset_rewards(project, rows, judged.rows),
        "operators": [report.as_dict() for report in judged.operators],
        "operators_version": pipeline.version,
        JUDGE_CODES: {**judge_codes(store, round_number), version: keep_user_code(project, *_named_by(other))},
        "sound": sound,
        "seconds": perf_counter() - started,
    }
    store.write_note(round_number, JUDGE, summary)
    return summary


def _workflow_version(store: ExperienceStore, round_number: int) -> str:
    """The judge version of rewards that the workflow set: it names the user's code that explored."""
    code = workflow_code(store, round_number)
    return WORKFLOW_REWARD if code is None else f"{WORKFLOW_REWARD}-{code}"


def _judge_names(store: ExperienceStore, round_number: int) -> dict[str, str]:
    """The names of the judges that have judged a round, by version; none before the first judgement."""
    note = store.read_note(round_number, JUDGE)
    return {} if note is None else dict(note["judge_names"])


def _named_by(other: OtherJudge | None) -> list[Any]:
    """The settings of a judge that replaces the configured one."""
    if other is None:
        return []
    judges = other.judge if isinstance(other.judge, str) else [entry.model_dump() for entry in other.judge]
    return [judges, dict(other.args)]


def quality(project: Project, round_number: int, judge_version: str) -> tuple[RolloutQuality, JudgedQuality]:
    """The results of the checks on a round's rollouts and on one judgement of them."""
    store = project.store
    rollouts = store.read_rollouts(round_number, columns=ROLLOUT_COLUMNS)
    judged = store.read_judged(round_number, judge_version, columns=JUDGED_COLUMNS)
    policy = project.config.explorer.group_policy
    repeat_times = None if project.config.online else project.batches.repeat_times  # production traffic decides
    return check_rollouts(rollouts, repeat_times, policy), check_judged(judged, rollouts)


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
    """Reward figures of the first policy, and some of the further policies as ``<figure>/<name>``.

    ``judged`` and ``rows`` are in the same order.
    """
    found: dict[str, float] = {}
    for name in project.policies:
        own = [one for one, row in zip(judged, rows, strict=True) if row.call.policy == name]
        summary = _reward_summary(own, has_advantage)
        shown = summary if name == FIRST_POLICY else _OF_EVERY_POLICY
        found |= {stored_name(figure, name, "/"): summary[figure] for figure in shown}
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
        if row.call.policy == FIRST_POLICY and math.isfinite(one.reward):
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
    """Figures of the active judgement; None before the first."""
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
        judge=_judge_names(store, round_number).get(version, ""),
        runs=len(found),
        failed=len(failed),
        dropped_rows=sum(row["dropped_by"] not in (None, JUDGE_ERROR) for row in table),
        mean_reward=sum(found) / len(found) if found else None,
        pass_rate=sum(reward >= PASS_REWARD - 1e-9 for reward in found) / len(found) if found else None,
    )


def restore(project: Project, round_number: int, version: str) -> dict[str, Any]:
    """Make a stored judgement active again; returns the round's report.

    Raises UserError if the judgement is not stored or not sound.
    """
    started, store = perf_counter(), project.store
    known = store.judge_versions(round_number)
    if version not in known:
        raise UserError(
            f"{round_key(round_number)} has no judgement {version!r}; it has {', '.join(known) or 'none'}: give one of "
            "them"
        )
    rollouts_found, judged_found = quality(project, round_number, version)
    if not (rollouts_found.sound and judged_found.sound):
        raise UserError(f"judgement {version} of {round_key(round_number)} is not sound: judge the round again")
    by_row = {row.row_id: row for row in store.judged_rows(round_number, version)}
    rows = store.rollout_rows(round_number)
    judged = [by_row[row.row_id] for row in rows]
    summary = {
        "rows": len(judged),
        "judge_version": version,
        "judge_names": _judge_names(store, round_number),
        JUDGE_CODES: judge_codes(store, round_number),
        "judge_errors": len({row.run_id for row in judged if row.dropped_by == JUDGE_ERROR}),
        **reward_figures(project, judged, rows, has_advantage=project.settings.algorithm.advantage is not None),
        "operators": [],
        "restored": True,
        "sound": True,
        "seconds": perf_counter() - started,
    }
    store.put_in_force(round_number, version)
    store.write_note(round_number, JUDGE, summary)
    return summary
