"""Judgement of a round: rewards and advantages for its stored rollouts, by the configured judge or another one."""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from rft_platform.config.buffer import Taskset
from rft_platform.errors import StorageError
from rft_platform.experience.quality import (
    JUDGED_COLUMNS,
    ROLLOUT_COLUMNS,
    JudgedQuality,
    RolloutQuality,
    check_judged,
    check_rollouts,
)
from rft_platform.experience.record import JudgedRow
from rft_platform.experience.rounds import round_key
from rft_platform.judging.apply import WORKFLOW_REWARD, judge_rollouts
from rft_platform.judging.compose import JudgeSpec, build_judge
from rft_platform.rounds.algorithm import chosen_algorithm, shaping_of
from rft_platform.rounds.mend import refuse_damaged_rows
from rft_platform.rounds.project import Project

NOTE = "judge"


def judge(project: Project, round_number: int, other_judge: str | None = None) -> dict[str, Any]:
    """Judge a round's stored rollouts and put the judgement in force if it is sound; returns the round's report.

    ``other_judge`` replaces the configured one. Judgements by earlier judges stay beside it. Raises StorageError where
    the round has no rollouts.
    """
    started, store = perf_counter(), project.store
    refuse_damaged_rows(project, round_number, rests_on="explore")
    rows = store.rollout_rows(round_number)
    if not rows:
        raise StorageError(f"{round_key(round_number)} has no rollouts to judge: run explore_job for it first")
    chosen = chosen_algorithm(project.config)
    spec = judge_spec(project.taskset, other_judge)
    judged = judge_rollouts(
        rows,
        {task.task_id: task for task in project.tasks.tasks},
        spec,
        advantage_fn=chosen.advantage,
        advantage_args=chosen.advantage_args,
        shaping=shaping_of(project.config),
        needs_reward=chosen.needs_reward,
    )
    version = WORKFLOW_REWARD if spec is None else spec.version
    store.write_judged(round_number, version, judged.rows, make_current=False)
    rollouts_found, judged_found = quality(project, round_number, version)
    sound = rollouts_found.sound and judged_found.sound and not rollouts_found.incomplete_groups
    if sound:
        store.put_in_force(round_number, version)
    summary = {
        "rows": len(judged.rows),
        "judge_version": version,
        "judge_errors": len(judged.errors),
        **_reward_summary(judged.rows, has_advantage=chosen.advantage is not None),
        "sound": sound,
        "seconds": perf_counter() - started,
    }
    store.write_note(round_number, NOTE, summary)
    return summary


def judge_spec(taskset: Taskset, other_judge: str | None = None) -> JudgeSpec | None:
    """The judge of a taskset; None where its workflow rewards itself."""
    if other_judge is not None:
        return build_judge(other_judge, answer_key=taskset.format.response_key)
    if taskset.judge is None:
        return None
    return build_judge(taskset.judge, taskset.judge_args, answer_key=taskset.format.response_key)


def quality(project: Project, round_number: int, judge_version: str) -> tuple[RolloutQuality, JudgedQuality]:
    """What the checks of a round's rollouts and of one judgement of them found."""
    store = project.store
    rollouts = store.read_rollouts(round_number, columns=ROLLOUT_COLUMNS)
    judged = store.read_judged(round_number, judge_version, columns=JUDGED_COLUMNS)
    return check_rollouts(rollouts, project.repeat_times), check_judged(judged, rollouts)


def sample_transcripts(project: Project, round_number: int, count: int = 6) -> str:
    """A few runs of a round to read, from the best reward to the worst, as Markdown."""
    from rft_platform.experience.queries import connect, rollout_transcripts

    with connect(project.store, rounds=[round_number]) as connection:
        runs = rollout_transcripts(connection, round_number, count)
    return "\n\n".join(map(_transcript, runs))


def _transcript(run: dict[str, Any]) -> str:
    answer = run["response"].get("content") or "–"
    return f"**reward {run['reward']:.2f}** · {_last_question(run['messages'])}\n\n> {answer}"


def _last_question(messages: list[dict[str, Any]]) -> str:
    return str(next((message["content"] for message in reversed(messages) if message["role"] == "user"), ""))


def _reward_summary(rows: Sequence[JudgedRow], has_advantage: bool) -> dict[str, float]:
    """Reward over runs (a run's reward is the same on all its rows), and how many rows carry a signal.

    Runs that a filter keeps from training count in the reward: it says how good the policy is. Where no advantage is
    made yet every row that is kept may carry a signal.
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
