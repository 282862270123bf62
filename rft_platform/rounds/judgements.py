"""Stored judgements of a round: their figures, and making an earlier one active ("in force") again."""

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rft_platform.errors import UserError
from rft_platform.experience.rounds import round_key
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.apply import JUDGE_ERROR
from rft_platform.rounds.judge import NOTE, quality, reward_figures
from rft_platform.rounds.project import Project

PASS_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class JudgementFigures:
    """Figures of one judgement of a round."""

    round: int
    judge_version: str
    runs: int  # with a reward
    failed: int  # runs for which the judge failed
    dropped_rows: int  # rows that an operator keeps from training
    mean_reward: float | None
    pass_rate: float | None  # fraction of rewarded runs with a reward of 1 or more


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
        runs=len(found),
        failed=len(failed),
        dropped_rows=sum(row["dropped_by"] not in (None, JUDGE_ERROR) for row in table),
        mean_reward=sum(found) / len(found) if found else None,
        pass_rate=sum(reward >= PASS_REWARD - 1e-9 for reward in found) / len(found) if found else None,
    )


def restore(project: Project, round_number: int, version: str) -> dict[str, Any]:
    """Make a stored judgement active again; returns the round's report.

    Raises UserError if it is not stored or not sound.
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
        "judge_errors": len({row.run_id for row in judged if row.dropped_by == JUDGE_ERROR}),
        **reward_figures(project, judged, rows, has_advantage=project.settings.algorithm.advantage is not None),
        "operators": [],
        "restored": True,
        "sound": True,
        "seconds": perf_counter() - started,
    }
    store.put_in_force(round_number, version)
    store.write_note(round_number, NOTE, summary)
    return summary
