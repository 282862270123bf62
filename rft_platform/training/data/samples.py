"""One training row: the token ids of a model call, the mask of trained tokens, and the weight of the row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Sample:
    """A prompt and its response as the model saw them. Arrays cover all n tokens, prompt first.

    Per-token values are ignored where ``loss_mask`` is False. The first token cannot be trained, because no token
    predicts it.
    """

    row_id: str
    token_ids: np.ndarray  # int32 [n]
    loss_mask: np.ndarray  # bool [n]
    rollout_logprobs: np.ndarray | None = None  # float32 [n]; None: a demonstration
    advantage: float | np.ndarray = 0.0  # one value for the row, or float32 [n]
    temperature: float = 1.0  # divisor of the logits
    weight: float = 1.0  # factor on the row's loss; the normaliser ignores it
    expert: bool = False  # a demonstration mixed into rollouts
    group: int = 0  # rows of a group are evaluated together if the loss needs whole groups (pairs)
    # ``precompute`` adds these fields before the first step; float32 [n] each, at the row's temperature:
    reference_logprobs: np.ndarray | None = None  # under the reference model
    teacher_logprobs: np.ndarray | None = None  # under the teacher
    old_logprobs: np.ndarray | None = None  # under this policy at the start of the training
    old_values: np.ndarray | None = None  # by the critic at the start of the training
    returns: np.ndarray | None = None  # training targets of the critic
    entropy_change: np.ndarray | None = None  # how the entropy depends on each token (``precompute.py``)
    selected: np.ndarray | None = None  # 1.0 on tokens that the loss selects from a step; ``select_tokens`` sets it
    mismatched: "Sample | None" = None  # this row's prompt with the answer of another row (``kl_baseline``)
    kl_baseline: np.ndarray | None = None  # the step's KL estimate on every token; ``kl_baseline`` sets it

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if n == 0 or len(self.loss_mask) != n:
            raise ValueError(
                f"row {self.row_id}: {n} tokens and {len(self.loss_mask)} mask values: expected equal numbers >= 1"
            )
        if self.loss_mask[0]:
            raise ValueError(f"row {self.row_id}: its first token is marked trainable, but no token predicts it")
        for name in _PER_TOKEN:
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(f"row {self.row_id}: {len(values)} {name} for {n} tokens; expected one per token")
        if self.temperature <= 0:
            raise ValueError(f"row {self.row_id}: temperature {self.temperature}: expected a positive number")


_PER_TOKEN = (
    "rollout_logprobs", "reference_logprobs", "teacher_logprobs", "old_logprobs", "old_values", "returns",
    "entropy_change",
)  # fmt: skip


def rollout_sample(
    row_id: str,
    prompt_ids: Sequence[int] | np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    rollout_logprobs: Sequence[float] | np.ndarray,
    loss_mask: Sequence[bool] | np.ndarray,
    *,
    advantage: float,
    temperature: float = 1.0,
) -> Sample:
    """Build a sample from a stored rollout row. ``rollout_logprobs`` and ``loss_mask`` cover the response only."""
    start = len(prompt_ids)
    token_ids = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)])
    mask, logprobs = np.zeros(len(token_ids), bool), np.zeros(len(token_ids), np.float32)
    mask[start:], logprobs[start:] = loss_mask, rollout_logprobs
    return Sample(row_id, token_ids, mask, logprobs, advantage, temperature)


def demonstration_sample(
    row_id: str, token_ids: Sequence[int] | np.ndarray, loss_mask: Sequence[bool] | np.ndarray
) -> Sample:
    """Build a demonstration (SFT): tokens with ``loss_mask`` True are imitated. Both sequences cover the whole row."""
    return Sample(row_id, np.asarray(token_ids, np.int32), np.asarray(loss_mask, bool))
