"""Identity preference optimisation (IPO, Azar et al., arXiv 2310.12036, equation 17)."""

from pydantic import PositiveFloat

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs, log_ratios
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_count


@loss("ipo", policy_gradient=False, whole_groups=True, reference=True, loss_agg_modes=AGGREGATIONS)
def ipo(tokens: TokenBatch, *, beta: PositiveFloat = 0.1, length_normalize: bool = False) -> TokenLoss:
    """``(d - 1 / (2 beta))^2``, ``d = (logp_w - ref_w) - (logp_l - ref_l)``; ``beta`` is the paper's tau.

    The loss is smallest at the finite difference ``d = 1 / (2 beta)``, so certain preferences do not drive ``d`` to
    infinity as DPO's loss does. Log-probs are summed over a row's tokens as in the paper; with ``length_normalize``
    they are means (TRL's ``loss_type: ipo``). Implicit reward: ``beta (logp - ref)``.
    """
    pairs, ratio = Pairs.of(tokens), log_ratios(tokens)
    if length_normalize:
        ratio = ratio / row_count(tokens)
    return pairs.loss((pairs.difference(ratio) - 1 / (2 * beta)).square(), beta * ratio)
