"""The records of the experience store: a model call (``ModelCall``) in its row (``RolloutRow``), and its judgement."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rft_platform.common.policy_names import DEFAULT_POLICY

ROLLOUT_SCHEMA_VERSION = 1
JUDGED_SCHEMA_VERSION = 1

#: The limit of the column. Larger values are stored as this limit: both exceed any vocabulary size.
LARGEST_TOP_K = 2**31 - 1

#: The limit of 32-bit floats, which TensorBoard stores. As 64-bit floats, sums and squares of such values are finite.
LARGEST_METRIC = 3.4e38
METRIC_EXPECTED = "a finite number (at most 3.4e38); omit a metric that has no value"

#: A reward that is less than this below a threshold reaches it: weights 0.7, 0.2 and 0.1 add up to 0.9999999999999999.
REWARD_ROUNDING = 1e-9

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


_NOT_STORED: Mapping[str, bool] = {"stored": False}


@dataclass(slots=True)
class ModelCall:
    """One choice of a model call, with the exact tokens that the engine sampled.

    The recorder creates it, and the store writes it to Parquet.

    ``response_ids`` and ``rollout_logprobs`` have equal length. ``rollout_logprobs`` are natural logarithms under the
    sampling distribution (temperature applied). A workflow may set ``reward``, ``step_reward``, ``metrics`` and
    ``env_state_hash``; all other fields are recorded facts. Every field is a column of the store, except those that are
    needed only while the run lasts.
    """

    msg_id: str  # id of the engine's response
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: str
    temperature: float
    top_p: float
    top_k: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]  # the assistant message
    policy_version: int | None = None  # optimiser steps of the weights that sampled; None: not reported
    token_versions: list[int] = field(default_factory=list)  # of each token, if several versions sampled the answer
    created_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    env_state_hash: str | None = None  # hash of the environment's state at this call; None: the workflow reported none
    policy: str = DEFAULT_POLICY  # name of the trainable policy that was called
    step_reward: float | None = None  # the environment's reward for this step alone, if the workflow reported it
    # needed while the run lasts; a row has ``step``, ``row_id``, ``run_reward`` and ``loss_mask`` instead:
    order: int = field(default=0, compare=False, metadata=_NOT_STORED)  # position of the call, by its first send
    choice: int = field(default=0, compare=False, metadata=_NOT_STORED)
    reward: float | None = field(default=None, compare=False, metadata=_NOT_STORED)  # of the run, set by a workflow
    constrained: bool = field(default=False, compare=False, metadata=_NOT_STORED)  # sampled under a grammar

    @property
    def response_text(self) -> str:
        """Text of the answer; empty if the answer has tool calls only."""
        return self.response.get("content") or ""


#: Fields of a call that are columns of the store.
CALL_COLUMNS = tuple(each.name for each in fields(ModelCall) if each.metadata.get("stored", True))


@dataclass(slots=True)
class RolloutRow:
    """A model call and its place in the project. Written once, never changed.

    ``loss_mask`` has one value per token of the response. ``run_output`` and ``run_reward`` are set in the last row of
    a run only. The fields of ``call`` can be read on the row as well: ``row.response_ids``.
    """

    row_id: str
    task_id: str
    taskset: str
    group_id: str  # runs of one task in one round
    run_id: str  # one run of the workflow
    step: int  # position of the call within its run, from 0
    round: int
    engine: str
    template_hash: str  # digest of the chat template that rendered the prompt
    call: ModelCall
    loss_mask: list[bool]  # True if the policy sampled the token and it may be trained on
    truncated: bool
    run_output: Any = None  # what the workflow returned for the judge, JSON-serialisable
    run_reward: float | None = None  # the workflow's own reward, if it returned one
    attempt: int | None = None  # attempt of the run, from 0; its sampling seed depends on it; None: not recorded

    @classmethod
    def from_columns(cls, **values: Any) -> "RolloutRow":
        """The row with these values; ``values`` has one entry per column."""
        call = ModelCall(**{name: values.pop(name) for name in CALL_COLUMNS if name in values})
        return cls(call=call, **values)

    if not TYPE_CHECKING:  # the package itself uses ``row.call``, whose fields mypy checks

        def __getattr__(self, name: str) -> Any:
            if name in CALL_COLUMNS:
                return getattr(self.call, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


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
    masked: bool = False  # ``dropped_by`` is set, but the run's reward counts in its group
    judge_error: str | None = None  # why the judge failed on the run, with the place in the user's code
