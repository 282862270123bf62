"""Losses against the collapse of the entropy. They select tokens from all rows of a step and change their loss.

Clip-Cov and KL-Cov (Cui et al., arXiv 2505.22617): the larger the covariance of log-prob and advantage, the faster the
entropy falls. Few tokens have nearly all of the covariance; these losses remove the gradient of such tokens or penalise
them. The covariance of a token is ``(logp - mean) (A - mean)`` with means over all tokens of the optimiser step, on all
ranks. ``logp`` is the log-prob in the denominator of the ratio. In the first step after sampling this is the log-prob
of the policy, as in the paper; in later steps the paper uses the log-probs of the policy at that step.

Clip-B and Clip-V (arXiv 2602.03392): if the logit of a sampled token rises, the entropy H of its distribution changes
by ``-S`` to first order, with ``S = p (H + log p)`` and the token's probability p. An unlikely token has a negative S:
a negative advantage makes it still less likely, and the entropy falls. These losses remove the gradient of such tokens.
S is computed with the policy at the start of a training.
"""

from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from rft_platform.algorithms.losses.ppo import DualClip, ppo
from rft_platform.algorithms.losses.registry import StepTokens, TokenBatch, TokenLoss, Total, loss

Ratio = Annotated[float, Field(gt=0, le=1)]


def in_band(tokens: StepTokens, *, select_ratio: float, cov_low: float, cov_high: float) -> np.ndarray:
    """Select tokens at random among those with a covariance between ``cov_low`` and ``cov_high``.

    The number of selected tokens is at most the fraction ``select_ratio`` of all tokens.
    """
    covariance, count = _covariance(tokens)
    inside = (covariance > cov_low) & (covariance < cov_high)
    draw = np.where(inside, tokens.draw, -1.0)
    return inside & (draw >= kth_largest(draw, _wanted(select_ratio, count), tokens.total))


def largest(tokens: StepTokens, *, select_ratio: float) -> np.ndarray:
    """Select the tokens with the largest covariances: the fraction ``select_ratio`` of all tokens.

    Among tokens with equal covariances, which are all tokens of a step without advantages, it selects at random.
    """
    covariance, count = _covariance(tokens)
    return _largest(covariance, _wanted(select_ratio, count), tokens)


@loss("clip_cov", zero_advantage_is_inert=True, selects=in_band)
def clip_cov(
    tokens: TokenBatch,
    *,
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.2,
    select_ratio: Ratio = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> TokenLoss:
    """``ppo`` without the dual clip; the tokens of ``in_band`` have no gradient (Clip-Cov). Metrics as ``clip_b``."""
    return _without_selected(tokens, ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None))


@loss("kl_cov", selects=largest)
def kl_cov(tokens: TokenBatch, *, kl_coef: NonNegativeFloat = 1.0, select_ratio: Ratio = 2e-3) -> TokenLoss:
    """``-A rho``, and for selected tokens ``+ kl_coef |log rho|`` (KL-Cov); there is no clip.

    ``largest`` selects them. Metric ``selected``.
    """
    selected = _selected(tokens)
    ratio = tokens.log_ratio().exp()
    assert tokens.old_logprobs is not None
    penalty = kl_coef * (tokens.logp - tokens.old_logprobs).abs()
    return TokenLoss(-tokens.advantage * ratio + selected * penalty, {"selected": selected.sum()})


def _covariance(tokens: StepTokens) -> tuple[np.ndarray, float]:
    """Covariance of each token, and the number of tokens on all ranks."""
    sums = tokens.total(np.array([len(tokens.logp), tokens.logp.sum(), tokens.advantage.sum()]))
    count, logp, advantage = sums.tolist()
    count = max(count, 1.0)
    return (tokens.logp - logp / count) * (tokens.advantage - advantage / count), count


def _wanted(share: float, count: float) -> int:
    return max(1, int(share * count))


def _largest(values: np.ndarray, wanted: int, tokens: StepTokens) -> np.ndarray:
    """Select the ``wanted`` tokens of all ranks with the largest ``values``; among equal values at random."""
    bound = kth_largest(values, wanted, tokens.total)
    above, equal = values > bound, values == bound
    rest = wanted - int(tokens.total(np.array([np.count_nonzero(above)], np.float64))[0])
    draw = np.where(equal, tokens.draw, -1.0)
    return above | equal & (draw >= kth_largest(draw, rest, tokens.total))


def kth_largest(values: np.ndarray, k: int, total: Total) -> float:
    """The k-th largest (from 1) of the float64 ``values`` of all ranks; -inf if there are fewer than k.

    The value is found byte by byte, from histograms that are summed over the ranks. If the sign bit of a float64 (for a
    negative number: every bit) is inverted, the bits have the order of the numbers.
    """
    sign = np.uint64(1 << 63)
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    bits = np.where(bits & sign, ~bits, bits | sign)
    found = 0
    for shift in range(56, -1, -8):
        byte = ((bits >> np.uint64(shift)) & np.uint64(255)).astype(np.int64)
        above = np.cumsum(total(np.bincount(byte, minlength=256).astype(np.float64))[::-1])
        place = int(np.searchsorted(above, k))
        if place > 255:
            return -np.inf
        k -= int(above[place - 1]) if place else 0
        found = found << 8 | 255 - place
        bits = bits[byte == 255 - place]
    ordered = np.array([found], np.uint64)
    return float(np.where(ordered & sign, ordered ^ sign, ~ordered).view(np.float64)[0])


_LEAST_STD = 1e-12  # below it all tokens are alike, and no token is selected


def below_the_batch(tokens: StepTokens, *, mu: float) -> np.ndarray:
    """Select tokens with a negative advantage whose S is more than ``mu`` standard deviations below the step's mean."""
    mean, std, _ = _moments(tokens.entropy_change, tokens.total)
    return (tokens.advantage < 0) & (tokens.entropy_change - mean < -mu * std) & (std >= _LEAST_STD)


def below_the_vocabulary(tokens: StepTokens, *, mu: float, max_share: float) -> np.ndarray:
    """Select tokens with a negative advantage whose S is far below its expectation over the vocabulary.

    The difference to the expectation is ``entropy_change``. "Far" is more than ``mu`` standard deviations of the
    differences in the step. At most the share ``max_share`` of all tokens is selected, rounded up to one token: those
    that are farthest, and among tokens that are equally far a random choice.
    """
    _, std, count = _moments(tokens.entropy_change, tokens.total)
    far = (tokens.advantage < 0) & (tokens.entropy_change < -mu * std) & (std >= _LEAST_STD)
    distance = np.where(far, -tokens.entropy_change, -np.inf)
    return far & _largest(distance, _wanted(max_share, count), tokens)


@loss("clip_b", zero_advantage_is_inert=True, selects=below_the_batch, entropy_change="plain")
def clip_b(
    tokens: TokenBatch,
    *,
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
    mu: NonNegativeFloat = 2.5,
) -> TokenLoss:
    """``ppo``; the tokens of ``below_the_batch`` have no gradient. Metrics: those of ``ppo``, and ``selected``."""
    return _without_selected(tokens, ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


@loss("clip_v", zero_advantage_is_inert=True, selects=below_the_vocabulary, entropy_change="centred")
def clip_v(
    tokens: TokenBatch,
    *,
    clip_low: NonNegativeFloat = 0.2,
    clip_high: NonNegativeFloat = 0.28,
    dual_clip: DualClip | None = 3.0,
    mu: NonNegativeFloat = 8.5,
    max_share: Ratio = 1e-4,
) -> TokenLoss:
    """``ppo``; the tokens of ``below_the_vocabulary`` have no gradient. Metrics as ``clip_b``."""
    return _without_selected(tokens, ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def _selected(tokens: TokenBatch) -> Tensor:
    assert tokens.selected is not None, "the step selects tokens for every loss with `selects`"
    return tokens.selected > 0


def _without_selected(tokens: TokenBatch, out: TokenLoss) -> TokenLoss:
    selected = _selected(tokens)
    return TokenLoss(out.loss.detach().where(selected, out.loss), out.metrics | {"selected": selected.sum()})


def _moments(values: np.ndarray, total: Total) -> tuple[float, float, float]:
    """Mean, population standard deviation and number of the values of all ranks."""
    count, summed = total(np.array([len(values), values.sum()])).tolist()
    mean = summed / max(count, 1.0)
    (squares,) = total(np.array([np.square(values - mean).sum()])).tolist()
    return mean, float(np.sqrt(squares / max(count, 1.0))), count
