"""Direct preference optimisation (DPO, arXiv 2305.18290; with label smoothing: cDPO, Mitchell 2023)."""

from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch.nn.functional import logsigmoid

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss
from rft_platform.algorithms.losses.rows import row_count, row_sum


@loss("dpo", policy_gradient=False, whole_groups=True, reference=True, loss_agg_modes=("seq-mean-token-sum",))
def dpo(
    tokens: TokenBatch, *, beta: PositiveFloat = 0.1, label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
) -> TokenLoss:
    """``-(1 - s) logsigmoid(beta d) - s logsigmoid(-beta d)``, ``d = (logp_w - ref_w) - (logp_l - ref_l)``.

    Log-probs are summed over a row's tokens. The rows of a pair have the same ``row_group``; the chosen row has
    advantage +1, the rejected one -1. Each row's tokens share the pair's loss equally, so seq-mean-token-sum is the
    mean over pairs. Metrics, as sums over pairs: whether the chosen answer has the larger implicit reward, by how much
    (margin), and both implicit rewards.
    """
    assert tokens.reference_logprobs is not None, "the step checks this for every loss with a reference"
    assert tokens.row_group is not None, "the step gives it to every loss of whole groups"
    pair, groups = tokens.row_group, int(tokens.row_group.max()) + 1
    reward = beta * row_sum(tokens.logp - tokens.reference_logprobs, tokens)
    sign = torch.zeros_like(reward).scatter(0, tokens.row, tokens.advantage.sign())
    margin = reward.new_zeros(groups).index_add(0, pair, sign * reward)
    value = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    with torch.no_grad():
        paired = reward.new_zeros(groups).index_add(0, pair, sign.abs()) > 0  # numbers of groups may have gaps
        metrics = {
            "pairs": paired.sum(),
            "pair_accuracy": (margin > 0).sum(),
            "pair_margin": margin.sum(),
            "pair_reward_chosen": (reward * (sign > 0)).sum(),
            "pair_reward_rejected": (reward * (sign < 0)).sum(),
        }
    return TokenLoss((value[pair] / row_count(tokens))[tokens.row], metrics)
