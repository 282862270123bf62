"""Direct preference optimisation (DPO, arXiv 2305.18290; with label smoothing: cDPO, Mitchell 2023)."""

from typing import Annotated

from pydantic import Field, PositiveFloat
from torch.nn.functional import logsigmoid

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs, log_ratios
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


@loss("dpo", policy_gradient=False, whole_groups=True, reference=True, loss_agg_modes=AGGREGATIONS)
def dpo(tokens: TokenBatch, *, beta: PositiveFloat = 0.1, label_smoothing: Smoothing = 0.0) -> TokenLoss:
    """``-(1 - s) logsigmoid(beta d) - s logsigmoid(-beta d)``, ``d = (logp_w - ref_w) - (logp_l - ref_l)``.

    Log-probs are summed over a row's tokens; ``beta (logp - ref)`` is a row's implicit reward. ``label_smoothing`` is
    the assumed share of pairs whose labels are swapped.
    """
    pairs, reward = Pairs.of(tokens), beta * log_ratios(tokens)
    margin = pairs.difference(reward)
    value = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return pairs.loss(value, reward)
