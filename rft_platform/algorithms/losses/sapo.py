"""Soft gate instead of the clip (SAPO, arXiv 2511.20347)."""

import torch
from pydantic import PositiveFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("sapo", zero_advantage_is_inert=True, correction="none")
def sapo(tokens: TokenBatch, *, tau_pos: PositiveFloat = 1.0, tau_neg: PositiveFloat = 1.05) -> TokenLoss:
    """``-sigmoid(tau (rho - 1)) 4 / tau A``, with tau = ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere.

    At rho = 1 the gradient is that of ``-rho A``. The further rho is from 1, the smaller is the gradient: its factor is
    ``4 p (1 - p)`` with ``p = sigmoid(tau (rho - 1))``. The metric ``gate`` is this factor.
    """
    ratio = tokens.log_ratio().exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(tokens.advantage > 0, tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    return TokenLoss(-gate * (4 / tau) * tokens.advantage, {"gate": (4 * gate * (1 - gate)).detach().sum()})
