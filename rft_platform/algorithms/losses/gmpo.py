"""Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): the geometric mean of clipped token ratios."""

import torch
from pydantic import NonNegativeFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_mean


@loss("gmpo", zero_advantage_is_inert=True, whole_rows=True, loss_agg_modes=("seq-mean-token-mean",))
def gmpo(tokens: TokenBatch, *, clip_low: NonNegativeFloat = 0.4, clip_high: NonNegativeFloat = 0.4) -> TokenLoss:
    """``-A s``, ``s = exp(mean_t c_t)``; ``c = min(log rho, high)`` where A > 0, else ``max(log rho, -low)``.

    The bounds are bounds of the log-ratio: 0.4 allows ratios from e^-0.4 to e^0.4. The gradient of a row's loss with
    respect to the log-prob of each of its T tokens that is not clipped is ``-A s / T``. Metrics: number of clipped
    tokens.
    """
    log_rho = tokens.log_ratio()
    with torch.no_grad():
        cut_high = (tokens.advantage > 0) & (log_rho > clip_high)
        cut_low = (tokens.advantage < 0) & (log_rho < -clip_low)
        bounded = log_rho.clamp(max=clip_high).where(tokens.advantage > 0, log_rho.clamp(min=-clip_low))
        ratio = row_mean(bounded, tokens).exp()[tokens.row]
        metrics = {"clip_low": cut_low.sum(), "clip_high": cut_high.sum()}
    # The value of every token is the value of its row, but its gradient is only that with respect to its own log-prob.
    # So a weight of a token multiplies only the gradient of this token.
    own = (log_rho - log_rho.detach()).masked_fill(cut_low | cut_high, 0.0).exp()
    metrics["clip_fraction"] = metrics["clip_low"] + metrics["clip_high"]
    return TokenLoss(-tokens.advantage * ratio * own, metrics)
