"""Odds-ratio preference optimisation (ORPO, Hong et al., arXiv 2403.07691): no reference model."""

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_mean

_NEAR_1 = -1e-6  # largest mean log-prob whose odds are computed: 1 - p has no digit left in float32 beyond it


@loss("orpo", policy_gradient=False, whole_groups=True, loss_agg_modes=AGGREGATIONS)
def orpo(tokens: TokenBatch, *, beta: NonNegativeFloat = 0.1) -> TokenLoss:
    """``-m_w - beta logsigmoid(log odds_w - log odds_l)``, ``m`` the mean log-prob of a row's tokens.

    ``odds = p / (1 - p)`` with ``p = e^m``. The first term is supervised fine-tuning on the chosen row; ``beta`` is the
    paper's lambda. Implicit reward: ``beta m``. Metric ``pair_nll``: ``-m_w``.
    """
    pairs, mean = Pairs.of(tokens), row_mean(tokens.logp, tokens)
    chosen = pairs.chosen(mean)
    out = pairs.loss(-chosen - beta * logsigmoid(pairs.difference(_log_odds(mean))), beta * mean)
    out.metrics["pair_nll"] = -chosen.detach().sum()
    return out


def _log_odds(logp: Tensor) -> Tensor:
    """``log(p / (1 - p))`` for log-probs; constant and without a gradient for log-probs above ``_NEAR_1``."""
    logp = logp.clamp(max=_NEAR_1)
    return logp - torch.log(-torch.expm1(logp))
