"""Clipped surrogate: PPO (arXiv 1707.06347), clip-higher (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729)."""

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss

DualClip = Annotated[float, Field(gt=1)]


@loss("ppo", zero_advantage_is_inert=True)
def ppo(
    tokens: TokenBatch,
    *,
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
) -> TokenLoss:
    """``max(-A rho, -A clip(rho, 1 - low, 1 + high))``; for A < 0 at most ``-dual_clip * A``.

    ``rho = exp(logp - old_logprobs)``, with the logarithm clamped to +-20. Metrics: tokens whose gradient was cut at
    the lower bound, at the upper bound and by the dual clip; ``clip_fraction`` is their total.
    """
    ratio = tokens.log_ratio().exp()
    value = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        cut_low = (ratio < 1 - clip_low) & (tokens.advantage < 0)
        cut_high = (ratio > 1 + clip_high) & (tokens.advantage > 0)
        metrics = {"clip_low": cut_low.sum(), "clip_high": cut_high.sum()}
    if dual_clip is not None:
        bound = torch.where(tokens.advantage < 0, -dual_clip * tokens.advantage, torch.inf)
        metrics["clip_dual"] = (value.detach() > bound).sum()
        value = torch.minimum(value, bound)
    metrics["clip_fraction"] = torch.stack(list(metrics.values())).sum()
    return TokenLoss(value, metrics)
