"""Kahneman-Tversky optimisation (KTO, Ethayarajh et al., arXiv 2402.01306), on rows with and without a partner."""

import torch
from pydantic import PositiveFloat

from rft_platform.algorithms.losses.preferences.pairs import AGGREGATIONS, Pairs, log_ratios
from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_mean


@loss("kto", policy_gradient=False, whole_groups=True, mismatched=True, loss_agg_modes=AGGREGATIONS)
def kto(
    tokens: TokenBatch,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: PositiveFloat = 1.0,
    undesirable_weight: PositiveFloat = 1.0,
) -> TokenLoss:
    """``w (1 - sigmoid(beta s (r - z)))`` for each row, with ``r = logp - ref`` summed over its tokens.

    ``s`` is 1 and ``w`` is ``desirable_weight`` for a chosen (desirable) row, -1 and ``undesirable_weight`` for a
    rejected one: the two rows of a pair are not compared with each other, and a row needs no partner. ``z``
    (``kl_baseline``, without a gradient) is the mean of ``logp - ref`` over answers to other prompts, at least 0. The
    loss of a pair is the mean of its rows, so that the step's loss is the mean over rows. Implicit reward: ``beta r``.
    """
    assert tokens.kl_baseline is not None, "the step gives it to every mismatched loss"
    pairs, ratio, baseline = Pairs.of(tokens), log_ratios(tokens), row_mean(tokens.kl_baseline, tokens)
    weight = torch.where(pairs.sign > 0, desirable_weight, undesirable_weight) * pairs.sign.abs()
    value = weight * torch.sigmoid(-beta * pairs.sign * (ratio - baseline))
    out = pairs.loss(pairs.sum(value) / pairs.sum(pairs.sign.abs()).clamp(min=1), beta * ratio)
    out.metrics["kl_baseline"] = tokens.kl_baseline.sum()
    return out
