"""The record of one model call, and of its judgement: the platform's one description of an experience."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

ROLLOUT_SCHEMA_VERSION = 4  # 2: attempt; 3: env_state_hash; 4: policy, step_reward
JUDGED_SCHEMA_VERSION = 1

LARGEST_TOP_K = 2**31 - 1  #: the column's limit; more tokens than any vocabulary has, so the meaning stays

LARGEST_METRIC = 3.4e38  #: of 32-bit floats, which TensorBoard stores; sums and squares of such values stay finite
METRIC_EXPECTED = "a finite number (at most 3.4e38); leave a metric out where it has no value"

#: Metric of a run's last row: the workflow's own reward for a further policy, whose name follows.
POLICY_REWARD = "reward/"
#: Metric of a run's last row: 1 where the run ended because its next prompt was longer than the context.
TRUNCATED_METRIC = "truncated_by_context"
#: Metric of a run's last row: model calls that the agent broke off or did not wait for; absent where there are none.
UNFINISHED_METRIC = "unfinished_calls"


def row_id(run_id: str, step: int, choice: int = 0) -> str:
    """Identity of a model call: the same run, step and choice always give the same id, so re-runs are idempotent."""
    return hashlib.sha256(f"{run_id}/{step}/{choice}".encode()).hexdigest()[:32]


def is_metric_value(value: Any) -> bool:
    """Whether reports, MLflow and TensorBoard can average and show a value: a finite number of bounded size."""
    try:
        return abs(float(value)) <= LARGEST_METRIC  # false for NaN
    except (TypeError, ValueError, OverflowError):
        return False


def valid_text(text: str) -> str:
    """``text`` with every half of a surrogate pair (of a cut emoji, say) replaced by U+FFFD: UTF-8 cannot hold it.

    Two halves that stand side by side become the character that they are.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True)
class RolloutRow:
    """One model call, exactly as the engine saw it. Written once, never changed.

    ``response_ids``, ``logprobs`` and ``loss_mask`` have equal length; ``logprobs`` are natural logarithms under the
    sampling distribution (temperature applied). ``run_output`` and ``run_reward`` stand on the last row of a run only.
    """

    row_id: str
    task_id: str
    taskset: str
    group_id: str  # runs of one task in one round
    run_id: str  # one run of the workflow
    step: int  # position of the call within its run, from 0
    msg_id: str  # the id of the engine's answer
    round: int
    policy_version: int  # optimiser steps behind the weights that sampled
    engine: str
    template_hash: str  # digest of the chat template that rendered the prompt
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    loss_mask: list[bool]  # True where the token was sampled by the policy and may be trained on
    temperature: float
    top_p: float
    top_k: int
    finish_reason: str
    truncated: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]  # the assistant message
    run_output: Any = None  # what the workflow returned for the judge, JSON-serialisable
    run_reward: float | None = None  # the workflow's own reward, if it gave one
    metrics: dict[str, float] = field(default_factory=dict)
    created_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    attempt: int | None = None  # of the run, from 0: its sampling seed follows from it; None: not recorded then
    env_state_hash: str | None = None  # of the environment's state that the call answered; None: the workflow told none
    policy: str | None = None  # which of the project's further trainable policies was called; None: the first
    step_reward: float | None = None  # what the environment gave for this step alone, where the workflow told


@dataclass(slots=True)
class JudgedRow:
    """The judgement of one rollout row; joined to it by ``row_id``."""

    row_id: str
    group_id: str
    run_id: str
    step: int
    reward: float  # NaN where the judge failed on the run, which files and views hold as null
    reward_parts: dict[str, float]
    judge_version: str
    advantage: float  # one value for all trainable tokens of the row
    dropped_by: str | None = None  # the filter that keeps the row from training, if any
