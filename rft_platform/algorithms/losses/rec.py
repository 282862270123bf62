"""Group-relative REINFORCE with a clip mask (REC, arXiv 2509.24203); without one: AsymRE's loss (arXiv 2506.20520)."""

from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from rft_platform.algorithms.common.ratio import log_ratio
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
    assert tokens.old_logprobs is not None, "the step checks this for every policy-gradient loss"
    with torch.no_grad():
        ratio = log_ratio(tokens.logp, tokens.old_logprobs).exp()
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
