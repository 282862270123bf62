"""Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286)."""

import torch

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_sum


@loss("topr", zero_advantage_is_inert=True, correction="none", whole_rows_if="trajectory")
def topr(tokens: TokenBatch, *, trajectory: bool = False) -> TokenLoss:
    """``-sg(alpha) A logp`` with ``alpha = 1`` where A > 0 and ``clip(rho, 0, 1)`` where A <= 0.

    Good answers are learned as in SFT. The weight of a bad answer decreases as the policy moves away from the answer.
    ``rho`` is each token's ratio; with ``trajectory`` it is the paper's product over the row's tokens. Metric
    ``taper``: alpha.
    """
    with torch.no_grad():
        log_rho = tokens.log_ratio()
        if trajectory:
            log_rho = row_sum(log_rho, tokens)[tokens.row]
        alpha = torch.where(tokens.advantage > 0, torch.ones_like(log_rho), log_rho.clamp(max=0).exp())
    return TokenLoss(-alpha * tokens.advantage * tokens.logp, {"taper": alpha.sum()})
