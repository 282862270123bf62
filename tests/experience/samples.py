"""Rows that the tests of the store share."""

from typing import Any

import numpy as np

from rft_platform.experience.record import JudgedRow, RolloutRow, row_id
from rft_platform.rollout.recording.history import group_id, run_id


def step_row(run: str, step: int, *, response_ids: list[int], **columns: Any) -> RolloutRow:
    """The row of one step that the policy's first version sampled from its own distribution; every token is trained."""
    values: dict[str, Any] = {
        "row_id": row_id(run, step),
        "run_id": run,
        "step": step,
        "msg_id": f"{run}-{step}",
        "round": 1,
        "policy_version": 0,
        "engine": "test",
        "template_hash": "h",
        "prompt_ids": [1],
        "response_ids": response_ids,
        "rollout_logprobs": [-0.1] * len(response_ids),
        "loss_mask": [True] * len(response_ids),
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "finish_reason": "stop",
        "truncated": False,
        "messages": [],
        "tools": [],
        "response": {},
    }
    return RolloutRow.from_columns(**{**values, **columns})


def rollouts(groups: int = 2, repeats: int = 2, *, round: int = 1, batch: int = 0, **changes: Any) -> list[RolloutRow]:
    """Rows of ``groups`` tasks with ``repeats`` runs each, one step a run; ``changes`` apply to every row."""
    return [_rollout(round, batch, index, repeat, changes) for index in range(groups) for repeat in range(repeats)]


def _rollout(round: int, batch: int, index: int, repeat: int, changes: dict[str, Any]) -> RolloutRow:
    run, size = run_id(round, batch, index, repeat), 3 + index
    values: dict[str, Any] = {
        "row_id": row_id(run, 0),
        "task_id": f"task-{index}",
        "taskset": "set",
        "group_id": group_id(round, batch, index),
        "run_id": run,
        "step": 0,
        "msg_id": f"msg-{run}",
        "round": round,
        "policy_version": 4,
        "engine": "fake-1",
        "template_hash": "t",
        "prompt_ids": list(range(5 + index)),
        "response_ids": list(range(10, 10 + size)),
        "rollout_logprobs": np.linspace(-1, -0.25, size, dtype=np.float32).tolist(),
        "loss_mask": [True] * (size - 1) + [False],
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": -1,
        "finish_reason": "stop",
        "truncated": False,
        "messages": [{"role": "user", "content": f"Größe {index}?"}],
        "tools": [],
        "response": {"role": "assistant", "content": f"{repeat}", "tool_calls": None},
        "run_output": {"answer": [index, None]},
        "run_reward": None if repeat else 0.5,
        "metrics": {"turns": 1.0} if index else {},
        "created_at": 1700000000.25,
        "duration_s": 0.125,
    }
    return RolloutRow.from_columns(**{**values, **changes})


def judged(rows: list[RolloutRow], judge_version: str = "exact@1", **changes: Any) -> list[JudgedRow]:
    """A judgement of ``rows``: every first run of a group is right."""
    judgements = []
    for row in rows:
        reward = float(row.run_id.endswith("-000"))
        values: dict[str, Any] = {
            "row_id": row.row_id, "group_id": row.group_id, "run_id": row.run_id, "step": row.step, "reward": reward,
            "reward_parts": {"exact": reward}, "judge_version": judge_version, "advantage": reward - 0.5,
            "dropped_by": None,
        }  # fmt: skip
        judgements.append(JudgedRow(**{**values, **changes}))
    return judgements
