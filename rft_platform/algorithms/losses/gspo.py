"""Sequence-level importance ratio (GSPO, arXiv 2507.18071), in the token form of its section 4.3."""

import torch
from pydantic import NonNegativeFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_mean


@loss("gspo", zero_advantage_is_inert=True, whole_rows=True, loss_agg_modes=("seq-mean-token-mean",))
def gspo(tokens: TokenBatch, *, clip_low: NonNegativeFloat = 3e-4, clip_high: NonNegativeFloat = 4e-4) -> TokenLoss:
    """``max(-A s_t, -A clip(s_t, 1 - low, 1 + high))`` with ``s_t = sg(s) pi / sg(pi)``, ``s = exp(mean_t log rho)``.

    The value of ``s_t`` is the row's ratio ``s`` (the length-normalised likelihood ratio); its gradient is that of the
    token's own ``pi``. Metrics: number of tokens in clipped rows.
    """
    log_rho = tokens.log_ratio().detach()
    ratio = row_mean(log_rho, tokens).exp()[tokens.row] * (tokens.logp - tokens.logp.detach()).exp()
    value = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        cut_low = (ratio < 1 - clip_low) & (tokens.advantage < 0)
        cut_high = (ratio > 1 + clip_high) & (tokens.advantage > 0)
        metrics = {"clip_low": cut_low.sum(), "clip_high": cut_high.sum()}
    return TokenLoss(value, {**metrics, "clip_fraction": metrics["clip_low"] + metrics["clip_high"]})
