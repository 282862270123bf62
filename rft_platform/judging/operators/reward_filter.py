"""Rejection sampling: train only on runs whose reward is within a range."""

import numpy as np

from rft_platform.common.errors import UserError
from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

REWARD_FILTER = "reward_filter"


@operator(REWARD_FILTER)
def reward_filter(
    experiences: Experiences, *, threshold: float | None = None, max_reward: float | None = None
) -> Change:
    """Leave out runs whose reward is below ``threshold`` or above ``max_reward``."""
    if threshold is None and max_reward is None:
        raise UserError("experience operator 'reward_filter': give threshold, max_reward or both")
    low = -np.inf if threshold is None else threshold
    high = np.inf if max_reward is None else max_reward
    return Change(drop=(experiences.reward_R < low) | (experiences.reward_R > high))
