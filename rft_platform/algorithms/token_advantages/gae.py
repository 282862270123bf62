"""Generalised advantage estimation (arXiv 1506.02438) over whole runs, for PPO with a critic."""

import numpy as np

from rft_platform.algorithms.common.registry import Share
from rft_platform.algorithms.token_advantages.discount import discounted
from rft_platform.algorithms.token_advantages.registry import TokenAdvantages, Trajectories, token_advantage


@token_advantage("gae", whiten=True, critic=True)
def gae(tokens: Trajectories, *, gamma: Share = 1.0, lam: Share = 1.0) -> TokenAdvantages:
    """``delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}``; returns ``A + V``.

    The rows of a run are one trajectory: value and advantage pass from the first token of a step to the last token of
    the previous step, across the environment's output in between. After a run's last token, value and advantage are 0.
    """
    assert tokens.value is not None, "the training computes values before its first step"
    following = np.append(tokens.value[1:], 0.0)
    ends = tokens.start[1:][np.diff(tokens.start) > 0] - 1
    following[ends] = 0.0
    delta = tokens.reward + gamma * following - tokens.value
    advantage = discounted(delta, tokens.start, gamma * lam)
    return TokenAdvantages(advantage, advantage + tokens.value)
