"""Simple preference optimisation (SimPO, Meng et al., arXiv 2405.14734, equation 6): no reference model."""

from pydantic import NonNegativeFloat, PositiveFloat
from torch.nn.functional import logsigmoid

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_mean


@loss("simpo", policy_gradient=False, whole_groups=True, loss_agg_modes=AGGREGATIONS)
def simpo(tokens: TokenBatch, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0) -> TokenLoss:
    """``-logsigmoid(beta (m_w - m_l) - gamma)`` with ``m`` the mean log-prob of a row's tokens.

    ``beta m`` is a row's implicit reward, and ``gamma`` the margin by which the chosen row's should be larger. The
    defaults are those of the paper's Llama-3-Base run.
    """
    pairs, reward = Pairs.of(tokens), beta * row_mean(tokens.logp, tokens)
    return pairs.loss(-logsigmoid(pairs.difference(reward) - gamma), reward)
