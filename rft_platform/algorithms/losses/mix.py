"""Policy gradient on rollouts and imitation on demonstrations mixed in (MIX, Trinity-RFT; CHORD, arXiv 2508.11408)."""

import torch
from pydantic import NonNegativeFloat

from rft_platform.algorithms.losses.ppo import DualClip, ppo
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("mix", zero_advantage_is_inert=True, experts=True)
def mix(
    tokens: TokenBatch,
    *,
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
    phi: bool = False,
) -> TokenLoss:
    """The loss ``ppo`` on rollout tokens, and ``-logp`` on the tokens of ``expert`` rows, whose advantages are ignored.

    With ``phi`` the loss of an expert token is ``-sg(p (1 - p)) logp``, p its probability (CHORD-phi): tokens that the
    policy is sure of, right or wrong, have little weight.
    The caller computes ``(1 - w) * rollout loss + w * expert loss``, each normalised by its own count, when it weights
    the losses. Metric ``expert_nll``: -logp of the expert tokens.
    """
    out = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if tokens.expert is None:
        return out
    expert = tokens.expert > 0
    out.metrics["expert_nll"] = -(tokens.logp.detach() * expert).sum()
    imitation = -tokens.logp
    if phi:
        p = tokens.logp.detach().exp()
        imitation = imitation * p * (1 - p)
    return TokenLoss(torch.where(expert, imitation, out.loss), out.metrics)
