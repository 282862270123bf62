"""Clipped importance-sampling weight (CISPO, MiniMax-M1, arXiv 2506.13585)."""

import torch
from pydantic import NonNegativeFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("cispo", zero_advantage_is_inert=True, correction="none")
def cispo(tokens: TokenBatch, *, clip_low: NonNegativeFloat = 1.0, clip_high: NonNegativeFloat = 0.28) -> TokenLoss:
    """``-sg(clip(rho, 1 - low, 1 + high)) A logp``: the weight is clipped, and every token keeps its gradient.

    ``clip_low`` 1 means no lower bound. The upper bound is ``1 + clip_high`` here, but ``epsilon_high`` in TRL.
    """
    with torch.no_grad():
        ratio = tokens.log_ratio().exp()
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
        metrics = {"clip_low": (ratio < 1 - clip_low).sum(), "clip_high": (ratio > 1 + clip_high).sum()}
        metrics["clip_fraction"] = metrics["clip_low"] + metrics["clip_high"]
    return TokenLoss(-weight * tokens.advantage * tokens.logp, metrics)
