"""Hinge loss of preference pairs (RSO, arXiv 2309.06657, the loss hinge-norm; SLiC-HF's margin, arXiv 2305.10425)."""

from pydantic import PositiveFloat

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs, log_ratios
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("hinge", policy_gradient=False, whole_groups=True, reference=True, loss_agg_modes=AGGREGATIONS)
def hinge(tokens: TokenBatch, *, beta: PositiveFloat = 0.1) -> TokenLoss:
    """``max(0, 1 - beta d)``, ``d = (logp_w - ref_w) - (logp_l - ref_l)``, log-probs summed over a row's tokens.

    ``beta`` is the paper's gamma, the reciprocal of the margin. A pair whose difference is above ``1 / beta`` has no
    gradient. SLiC-HF itself takes ``d`` without the reference. Implicit reward: ``beta (logp - ref)``.
    """
    pairs, reward = Pairs.of(tokens), beta * log_ratios(tokens)
    return pairs.loss((1 - pairs.difference(reward)).relu(), reward)
