"""Select tokens from all rows of an optimiser step, on all ranks, before the step is packed.

Losses with ``selects`` give some tokens another loss. Which tokens these are depends on all tokens of the step.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from rft_platform.algorithms.losses.registry import StepTokens
from rft_platform.algorithms.objective import Objective
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce


def select_tokens(samples: Sequence[Sample], objective: Objective, reduce: Reduce) -> None:
    """Set ``selected`` of every sample, if the loss selects tokens. Every rank must make the same call."""
    selects = objective.policy_loss.selects
    if selects is None:
        return
    decoupled = objective.spec.correction == "decoupled"
    reads_change = objective.policy_loss.entropy_change is not None
    logp, advantage, draw, change = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for sample in samples:
        mask = sample.loss_mask
        values = sample.old_logprobs if decoupled else sample.rollout_logprobs
        logp.append(np.zeros(mask.sum()) if values is None else values[mask])  # the step refuses a row without them
        advantage.append(np.broadcast_to(sample.advantage, len(mask))[mask])
        draw.append(np.random.default_rng(zlib.crc32(sample.row_id.encode())).random(mask.sum()))
        if reads_change:
            assert sample.entropy_change is not None, "the training computes it before its first step"
            change.append(sample.entropy_change[mask])

    def total(values: np.ndarray) -> np.ndarray:
        return reduce(torch.from_numpy(values), "sum").numpy()

    joined = [np.concatenate(column).astype(np.float64) for column in (logp, advantage, draw, change)]
    chosen = selects(StepTokens(joined[0], joined[1], joined[2], total, joined[3]))
    ends = np.cumsum([np.count_nonzero(sample.loss_mask) for sample in samples])
    for sample, part in zip(samples, np.split(chosen, ends[:-1]), strict=False):
        sample.selected = np.zeros(len(sample.token_ids), np.float32)
        sample.selected[sample.loss_mask] = part
