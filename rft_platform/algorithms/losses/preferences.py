"""Losses of preference pairs: whole pairs at a time, one loss per pair.

The rows of a pair have the same ``row_group``. The chosen row has advantage +1, the rejected one -1. A row without a
partner is alone in its group. ``Pairs`` has the differences between the two rows, the loss and the metrics of each
pair.

With a reference model: ``dpo`` (arXiv 2305.18290; with label smoothing: cDPO, Mitchell 2023), ``ipo`` (Azar et al.,
arXiv 2310.12036, equation 17), ``hinge`` (RSO, arXiv 2309.06657, the loss hinge-norm; SLiC-HF's margin, arXiv
2305.10425), and ``kto`` (Kahneman-Tversky optimisation, Ethayarajh et al., arXiv 2402.01306), which also takes rows
without a partner. Without one: ``simpo`` (SimPO, Meng et al., arXiv 2405.14734, equation 6), and ``orpo`` (odds ratio,
Hong et al., arXiv 2403.07691).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss, row_count, row_mean, row_sum

#: The only aggregation that is the mean over pairs: the tokens of a row share the pair's loss.
AGGREGATIONS = ("seq-mean-token-sum",)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a batch. Numbers of groups may have gaps; a group without rows has difference 0."""

    tokens: TokenBatch
    group: Tensor  # int64 [rows]
    sign: Tensor  # [rows]: +1 chosen, -1 rejected, 0 a row without tokens

    @classmethod
    def of(cls, tokens: TokenBatch) -> "Pairs":
        """The pairs of ``tokens``."""
        assert tokens.row_group is not None, "the step gives it to every loss of whole groups"
        sign = torch.zeros(tokens.rows, dtype=tokens.logp.dtype, device=tokens.logp.device)
        return cls(tokens, tokens.row_group, sign.scatter(0, tokens.row, tokens.advantage.sign()))

    def sum(self, per_row: Tensor) -> Tensor:
        """Sum of ``per_row`` [rows] over each pair's rows, [groups]."""
        return per_row.new_zeros(int(self.group.max()) + 1).index_add(0, self.group, per_row)

    def difference(self, per_row: Tensor) -> Tensor:
        """The chosen row's value minus the rejected row's, [groups]."""
        return self.sum(self.sign * per_row)

    def chosen(self, per_row: Tensor) -> Tensor:
        """The chosen row's value, [groups]."""
        return self.sum((self.sign > 0) * per_row)

    def loss(self, per_pair: Tensor, reward: Tensor) -> TokenLoss:
        """Distribute the loss of each pair equally over the tokens of each of its rows; the sum over a row is the loss.

        ``reward`` [rows] is the implicit reward of each row. Metrics, as sums: whether the chosen row has the larger
        reward, and the difference of the rewards (margin), over pairs; both rewards, over chosen and rejected rows. The
        reward of a missing partner counts as 0.
        """
        with torch.no_grad():
            margin = self.difference(reward)
            metrics = {
                "pairs": (self.sum(self.sign.abs()) > 0).sum(),
                "pairs_chosen": (self.sign > 0).sum(),
                "pairs_rejected": (self.sign < 0).sum(),
                "pair_accuracy": (margin > 0).sum(),
                "pair_margin": margin.sum(),
                "pair_reward_chosen": (reward * (self.sign > 0)).sum(),
                "pair_reward_rejected": (reward * (self.sign < 0)).sum(),
            }
        return TokenLoss((per_pair[self.group] / row_count(self.tokens))[self.tokens.row], metrics)


def log_ratios(tokens: TokenBatch) -> Tensor:
    """``log pi(y) - log pi_ref(y)`` of each row, summed over its tokens, [rows]."""
    assert tokens.reference_logprobs is not None, "the step checks this for every loss with a reference"
    return row_sum(tokens.logp - tokens.reference_logprobs, tokens)


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


@loss("hinge", policy_gradient=False, whole_groups=True, reference=True, loss_agg_modes=AGGREGATIONS)
def hinge(tokens: TokenBatch, *, beta: PositiveFloat = 0.1) -> TokenLoss:
    """``max(0, 1 - beta d)``, ``d = (logp_w - ref_w) - (logp_l - ref_l)``, log-probs summed over a row's tokens.

    ``beta`` is the paper's gamma, the reciprocal of the margin. A pair whose difference is above ``1 / beta`` has no
    gradient. SLiC-HF itself takes ``d`` without the reference. Implicit reward: ``beta (logp - ref)``.
    """
    pairs, reward = Pairs.of(tokens), beta * log_ratios(tokens)
    return pairs.loss((1 - pairs.difference(reward)).relu(), reward)


@loss("simpo", policy_gradient=False, whole_groups=True, loss_agg_modes=AGGREGATIONS)
def simpo(tokens: TokenBatch, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0) -> TokenLoss:
    """``-logsigmoid(beta (m_w - m_l) - gamma)`` with ``m`` the mean log-prob of a row's tokens.

    ``beta m`` is a row's implicit reward, and ``gamma`` the margin by which the chosen row's should be larger. The
    defaults are those of the paper's Llama-3-Base run.
    """
    pairs, reward = Pairs.of(tokens), beta * row_mean(tokens.logp, tokens)
    return pairs.loss(-logsigmoid(pairs.difference(reward) - gamma), reward)


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
