"""The losses ``rec`` and ``sppo``.

``rec`` (arXiv 2509.24203) is REINFORCE with a mask that excludes clipped tokens; without a mask it equals the loss of
AsymRE (arXiv 2506.20520). ``sppo`` (arXiv 2108.05828) clips the log-ratio.
"""

import math
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("rec", zero_advantage_is_inert=True, correction="none")
def rec(
    tokens: TokenBatch,
    *,
    clip_mode: Literal["none", "one-side", "two-side", "ring"] = "one-side",
    weight: Literal["none", "importance_sampling"] = "none",
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    ring_low: NonNegativeFloat = 0.6,
    ring_high: NonNegativeFloat = 2.0,
) -> TokenLoss:
    """``-sg(M w) A logp`` with a mask M of ratios that are not clipped, and w = 1 or rho (``weight``).

    | clip_mode | M = 1 where |
    |---|---|
    | none | everywhere |
    | one-side | A > 0 and rho <= 1 + clip_high, or A < 0 and rho >= 1 - clip_low: PPO's clip as a mask |
    | two-side | 1 - clip_low <= rho <= 1 + clip_high |
    | ring | as two-side, or A > 0 and rho <= 1 - ring_low, or A < 0 and rho >= 1 + ring_high |

    The data may come from any policy: no other correction is applied. Metric ``clip_fraction``: tokens with an
    advantage and M = 0.
    """
    with torch.no_grad():
        ratio = tokens.log_ratio().exp()
        good, bad = tokens.advantage > 0, tokens.advantage < 0
        inside = (ratio >= 1 - clip_low) & (ratio <= 1 + clip_high)
        keep: Tensor = {
            "none": torch.ones_like(inside),
            "one-side": (good & (ratio <= 1 + clip_high)) | (bad & (ratio >= 1 - clip_low)),
            "two-side": inside,
            "ring": inside | (good & (ratio <= 1 - ring_low)) | (bad & (ratio >= 1 + ring_high)),
        }[clip_mode]
        factor = keep * ratio if weight == "importance_sampling" else keep.to(ratio.dtype)
    cut = ((good | bad) & ~keep).sum()
    return TokenLoss(-factor * tokens.advantage * tokens.logp, {"clip_fraction": cut})


@loss("sppo", zero_advantage_is_inert=True, correction="none")
def sppo(tokens: TokenBatch, *, epsilon: PositiveFloat = 0.3) -> TokenLoss:
    """``-A log(clip(rho, 1 / (1 + epsilon), 1 + epsilon))``: tokens outside the bounds have no gradient.

    Metric ``clip_fraction``: tokens outside the bounds.
    """
    log_rho, bound = tokens.log_ratio(), math.log1p(epsilon)
    cut = (log_rho.detach().abs() > bound).sum()
    return TokenLoss(-tokens.advantage * log_rho.clamp(-bound, bound), {"clip_fraction": cut})
