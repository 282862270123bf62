"""Aggregate per-token losses into one number: a weight for every token and one global normaliser.

    loss = sum over all tokens of weight * token loss / normaliser

The weight depends only on the token's row. The normaliser is counted over all ranks and all packs of the optimiser
step. Any split into micro-batches, packs or ranks therefore gives the same loss and the same gradients.
"""

from dataclasses import dataclass

import numpy as np

from rft_platform.algorithms.common.registry import unknown_name
from rft_platform.common.errors import UserError

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def check_mode(mode: str) -> str:
    """Return ``mode`` if it is one of ``MODES``; raise UserError otherwise."""
    if mode not in MODES:
        raise UserError(unknown_name("loss_agg_mode", mode, MODES))
    return mode


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One of ``MODES``; ``loss_norm_length`` is the constant length by which ``seq-mean-token-sum-norm`` divides."""

    loss_agg_mode: str = "token-mean"
    loss_norm_length: int | None = None

    def __post_init__(self) -> None:
        check_mode(self.loss_agg_mode)
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.loss_norm_length:
            raise UserError(
                "loss_agg_mode 'seq-mean-token-sum-norm' divides by a constant length: set loss_norm_length, "
                "for instance the largest number of response tokens"
            )

    def weights(self, tokens_R: np.ndarray) -> np.ndarray:
        """Weight of each token of a row, from the number of trainable tokens of each row (>= 1)."""
        if self.loss_agg_mode == "seq-mean-token-mean":
            return 1.0 / tokens_R
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            return np.full(len(tokens_R), 1.0 / (self.loss_norm_length or 1))
        return np.ones(len(tokens_R))

    def normaliser(self, tokens: float, rows: float) -> float:
        """The divisor, from numbers summed over all ranks: trainable ``tokens``, and ``rows`` that have such tokens."""
        return tokens if self.loss_agg_mode == "token-mean" else rows
