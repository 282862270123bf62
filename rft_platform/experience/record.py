"""The records of the experience store: one model call (``RolloutRow``) and its judgement (``JudgedRow``)."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

ROLLOUT_SCHEMA_VERSION = 5  # 2: attempt; 3: env_state_hash; 4: policy, step_reward; 5: rollout_logprobs (logprobs)
JUDGED_SCHEMA_VERSION = 1

LARGEST_TOP_K = 2**31 - 1  #: the column's limit; above any vocabulary size, so the meaning is unchanged

LARGEST_METRIC = 3.4e38  #: limit of 32-bit floats, as TensorBoard stores; sums and squares of such values are finite
METRIC_EXPECTED = "a finite number (at most 3.4e38); leave a metric out where it has no value"

#: Prefix of a metric in a run's last row: the workflow's own reward for a further policy, whose name follows.
POLICY_REWARD = "reward/"
#: Metric in a run's last row: 1 if the run ended because its next prompt exceeded the context.
TRUNCATED_METRIC = "truncated_by_context"
#: Metric in a run's last row: number of model calls that the agent cancelled or did not await; absent if 0.
UNFINISHED_METRIC = "unfinished_calls"


def row_id(run_id: str, step: int, choice: int = 0) -> str:
    """Id of a model call. The same run, step and choice always give the same id, so repeated runs are idempotent."""
    return hashlib.sha256(f"{run_id}/{step}/{choice}".encode()).hexdigest()[:32]


def is_metric_value(value: Any) -> bool:
    """Whether reports, MLflow and TensorBoard can average and show a value: a finite number of bounded size."""
    try:
        return abs(float(value)) <= LARGEST_METRIC  # false for NaN
    except (TypeError, ValueError, OverflowError):
        return False


def valid_text(text: str) -> str:
    """Replace unpaired surrogates in ``text`` (for example half of an emoji) by U+FFFD, since UTF-8 cannot encode them.

    Two adjacent halves of a pair become the character that they encode.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(slots=True)
class RolloutRow:
    """One model call, exactly as the engine saw it. Written once, never changed.

    ``response_ids``, ``rollout_logprobs`` and ``loss_mask`` have equal length. ``rollout_logprobs`` are natural
    logarithms under the sampling distribution (temperature applied). ``run_output`` and ``run_reward`` are set in the
    last row of a run only.
    """

    row_id: str
    task_id: str
    taskset: str
    group_id: str  # runs of one task in one round
    run_id: str  # one run of the workflow
    step: int  # position of the call within its run, from 0
    msg_id: str  # id of the engine's response
    round: int
    policy_version: int  # optimiser steps of the weights that sampled
    engine: str
    template_hash: str  # digest of the chat template that rendered the prompt
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    loss_mask: list[bool]  # True if the policy sampled the token and it may be trained on
    temperature: float
    top_p: float
    top_k: int
    finish_reason: str
    truncated: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]  # the assistant message
    run_output: Any = None  # what the workflow returned for the judge, JSON-serialisable
    run_reward: float | None = None  # the workflow's own reward, if it returned one
    metrics: dict[str, float] = field(default_factory=dict)
    created_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    attempt: int | None = None  # attempt of the run, from 0; its sampling seed depends on it; None: not recorded
    env_state_hash: str | None = None  # hash of the environment's state at this call; None: the workflow reported none
    policy: str | None = None  # which further trainable policy was called; None: the first policy
    step_reward: float | None = None  # the environment's reward for this step alone, if the workflow reported it


@dataclass(slots=True)
class JudgedRow:
    """The judgement of one rollout row; joined to it by ``row_id``."""

    row_id: str
    group_id: str
    run_id: str
    step: int
    reward: float  # NaN if the judge failed on the run; null in files and views
    reward_parts: dict[str, float]
    judge_version: str
    advantage: float  # one value for all trainable tokens of the row
    dropped_by: str | None = None  # the filter that excludes the row from training, if any
