"""REINFORCE++ (arXiv 2501.03262): returns whitened over the whole batch instead of a critic."""

import numpy as np

from rft_platform.algorithms.common.registry import Share
from rft_platform.algorithms.token_advantages.registry import TokenAdvantages, Trajectories, discounted, token_advantage


@token_advantage("reinforce_plus_plus", whiten=True)
def reinforce_plus_plus(tokens: Trajectories, *, gamma: Share = 1.0, baseline: bool = False) -> TokenAdvantages:
    """``A_t = r_t + gamma A_{t+1}``: the reward to go, including the KL penalty.

    With ``baseline``, the mean outcome of the task's runs is first subtracted from each run's reward. Each run counts
    once in the mean; a task needs two runs or more.
    """
    reward = tokens.reward
    if baseline:
        mean = np.bincount(tokens.group, tokens.outcome) / np.maximum(np.bincount(tokens.group), 1)
        acts = np.diff(tokens.start) > 0
        reward = reward.copy()
        reward[tokens.start[1:][acts] - 1] -= mean[tokens.group][acts]
    return TokenAdvantages(discounted(reward, tokens.start, gamma))
