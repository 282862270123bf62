"""Losses against the collapse of the entropy: Clip-B and Clip-V (arXiv 2602.03392).

If the logit of a sampled token rises, the entropy H of its distribution changes by ``-S`` to first order, with
``S = p (H + log p)`` and the token's probability p. An unlikely token has a negative S: a negative advantage makes it
still less likely, and the entropy falls. These losses remove the gradient of such tokens. S is computed with the policy
at the start of a training.
"""

from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from rft_platform.algorithms.losses.entropy.covariance import kth_largest
from rft_platform.algorithms.losses.ppo import DualClip, ppo
from rft_platform.algorithms.losses.registry import StepTokens, TokenBatch, TokenLoss, Total, loss

MaxShare = Annotated[float, Field(gt=0, le=1)]
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
    wanted = max(1, int(max_share * count))
    distance = np.where(far, -tokens.entropy_change, -np.inf)
    bound = kth_largest(distance, wanted, tokens.total)
    above, equal = far & (distance > bound), far & (distance == bound)
    rest = wanted - int(tokens.total(np.array([np.count_nonzero(above)], np.float64))[0])
    draw = np.where(equal, tokens.draw, -1.0)
    return above | equal & (draw >= kth_largest(draw, rest, tokens.total))


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
    max_share: MaxShare = 1e-4,
) -> TokenLoss:
    """``ppo``; the tokens of ``below_the_vocabulary`` have no gradient. Metrics as ``clip_b``."""
    return _without_selected(tokens, ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def _without_selected(tokens: TokenBatch, out: TokenLoss) -> TokenLoss:
    assert tokens.selected is not None, "the step selects tokens for every loss with `selects`"
    selected = tokens.selected > 0
    return TokenLoss(out.loss.detach().where(selected, out.loss), out.metrics | {"selected": selected.sum()})


def _moments(values: np.ndarray, total: Total) -> tuple[float, float, float]:
    """Mean, population standard deviation and number of the values of all ranks."""
    count, summed = total(np.array([len(values), values.sum()])).tolist()
    mean = summed / max(count, 1.0)
    (squares,) = total(np.array([np.square(values - mean).sum()])).tolist()
    return mean, float(np.sqrt(squares / max(count, 1.0))), count
