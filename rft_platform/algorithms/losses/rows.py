"""Sums and means over the tokens of each row, for losses that need whole rows."""

import torch
from torch import Tensor

from rft_platform.algorithms.losses.registry import TokenBatch


def row_sum(values: Tensor, tokens: TokenBatch) -> Tensor:
    """Sum of ``values`` [N] over each row's tokens, [rows]; 0 for a row without tokens."""
    return values.new_zeros(tokens.rows).index_add(0, tokens.row, values)


def row_count(tokens: TokenBatch) -> Tensor:
    """Number of tokens of each row, at least 1, [rows]."""
    return row_sum(torch.ones_like(tokens.logp), tokens).clamp(min=1)


def row_mean(values: Tensor, tokens: TokenBatch) -> Tensor:
    """Mean of ``values`` [N] over each row's tokens, [rows]."""
    return row_sum(values, tokens) / row_count(tokens)
