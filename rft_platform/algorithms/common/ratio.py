"""Importance ratios of trainer and rollout log-probs: metrics of the mismatch, weights, and masks against outliers.

``r = pi / pi_rollout`` on sampled tokens (current trainer policy over the policy that sampled). Metrics, weights and
masks are detached float32. The mask per token is IcePop's (arXiv 2510.18855). The mask per row uses the geometric mean
of r over the row's tokens by default, because the product of r moves away from 1 as rows get longer. The product is the
ratio of the whole sequence: only a weight by the product makes the expected gradient exact. Bounded weights are
truncated importance sampling (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training") or masked importance sampling (MIS: Liu et al. 2025, "When Speed Kills Stability").
"""

from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """``logp - other_logp`` clamped to +-20; where it is clamped, the gradient is 0."""
    return (logp - other_logp).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@torch.no_grad()
def mismatch_sums(logp: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Sums over tokens [N]: k3 estimate of KL(pi_rollout || pi), |delta logp|, r outside 1 +- 10 %, r and r squared."""
    delta = logp - rollout_logprobs
    excess = torch.expm1(delta.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))  # r - 1
    ratio = excess + 1
    return {
        "mismatch_k3": (excess - delta).sum(),
        "mismatch_abs": delta.abs().sum(),
        "mismatch_outside": (excess.abs() > 0.1).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio * ratio).sum(),
    }


def effective_sample_share(ratio_sum: float, ratio_squared_sum: float, count: float) -> float:
    """ESS / N = (sum r)^2 / (N sum r^2): 1 if all ratios are equal, near 0 if a few tokens have nearly all weight."""
    return ratio_sum**2 / (count * ratio_squared_sum) if ratio_squared_sum > 0 else 1.0


@torch.no_grad()
def token_mask(logp: Tensor, rollout_logprobs: Tensor, low: float, high: float) -> Tensor:
    """1.0 where ``low <= r <= high``, else 0.0; [N]."""
    ratio = log_ratio(logp, rollout_logprobs).exp()
    return ((ratio >= low) & (ratio <= high)).to(logp.dtype)


@torch.no_grad()
def correction_weight(
    logp: Tensor, rollout_logprobs: Tensor, cap: float, bound: Literal["truncate", "mask"] = "truncate"
) -> Tensor:
    """``r = pi / pi_rollout`` of each token, detached, [N]; above ``cap``, ``truncate`` gives cap and ``mask`` 0."""
    return _bounded(log_ratio(logp, rollout_logprobs).exp(), cap, bound)


@torch.no_grad()
def row_weight(
    logp: Tensor, rollout_logprobs: Tensor, row: Tensor, rows: int, cap: float, bound: Literal["truncate", "mask"]
) -> Tensor:
    """The product of r over the row of each token, bounded as in ``correction_weight``; detached, [N]."""
    total, _ = _row_sums(logp, rollout_logprobs, row, rows)
    return _bounded(total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp(), cap, bound)[row]


def _bounded(ratio: Tensor, cap: float, bound: Literal["truncate", "mask"]) -> Tensor:
    return ratio.clamp(max=cap) if bound == "truncate" else ratio * (ratio <= cap)


@torch.no_grad()
def row_mask(
    logp: Tensor,
    rollout_logprobs: Tensor,
    row: Tensor,
    rows: int,
    low: float,
    high: float,
    combine: Literal["geometric", "product"] = "geometric",
) -> Tensor:
    """1.0 on the tokens of rows whose ratio is in ``[low, high]``, else 0.0; [N].

    The ratio of a row is the geometric mean of r over its tokens, or the product.
    """
    total, count = _row_sums(logp, rollout_logprobs, row, rows)
    if combine == "geometric":
        total = total / count.clamp(min=1)
    ratio = total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return ((ratio >= low) & (ratio <= high)).to(logp.dtype)[row]


@torch.no_grad()
def veto_mask(logp: Tensor, rollout_logprobs: Tensor, row: Tensor, rows: int, low: float) -> Tensor:
    """0.0 on the tokens of rows that have a token with ``r < low``, else 1.0; [N]."""
    below = (log_ratio(logp, rollout_logprobs).exp() < low).to(logp.dtype)
    return (below.new_zeros(rows).index_add_(0, row, below) == 0).to(logp.dtype)[row]


def _row_sums(logp: Tensor, rollout_logprobs: Tensor, row: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sum of ``log r`` and number of tokens of each row, [rows]."""
    delta = logp - rollout_logprobs
    total = delta.new_zeros(rows).index_add_(0, row, delta)
    return total, delta.new_zeros(rows).index_add_(0, row, torch.ones_like(delta))
