"""The rows of preference pairs: differences between chosen and rejected row, and the loss and metrics of each pair.

The rows of a pair have the same ``row_group``. The chosen row has advantage +1, the rejected one -1. A row without a
partner is alone in its group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, row_count, row_sum

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
