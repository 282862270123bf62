"""Generalised advantage estimation (arXiv 1506.02438) over whole runs, for PPO with a critic.

Policy and critic may have different lambdas (VC-PPO, arXiv 2503.01491), and the lambda of the policy may grow with the
run's length (VAPO, arXiv 2504.05118, section 4.2).
"""

import numpy as np
from pydantic import PositiveFloat

from rft_platform.algorithms.common.registry import Share
from rft_platform.algorithms.token_advantages.registry import TokenAdvantages, Trajectories, discounted, token_advantage


@token_advantage("gae", whiten=True, critic=True)
def gae(
    tokens: Trajectories,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    lam_alpha: PositiveFloat | None = None,
    lam_critic: Share | None = None,
) -> TokenAdvantages:
    """``delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}``; returns ``A + V``.

    The rows of a run are one trajectory: value and advantage pass from the first token of a step to the last token of
    the previous step, across the environment's output in between. After a run's last token, value and advantage are 0.

    With ``lam_alpha``, lam is ``max(0, 1 - 1 / (lam_alpha T))`` for a run of T trained tokens, instead of ``lam``. The
    returns have ``lam_critic`` instead, if it is set; the advantages do not.
    """
    assert tokens.value is not None, "the training computes values before its first step"
    following = np.append(tokens.value[1:], 0.0)
    ends = tokens.start[1:][np.diff(tokens.start) > 0] - 1
    following[ends] = 0.0
    delta = tokens.reward + gamma * following - tokens.value
    policy = lam if lam_alpha is None else _adapted(tokens, lam_alpha)
    advantage = discounted(delta, tokens.start, gamma * policy)
    if lam_critic is None:
        return TokenAdvantages(advantage, advantage + tokens.value)
    return TokenAdvantages(advantage, discounted(delta, tokens.start, gamma * lam_critic) + tokens.value)


def _adapted(tokens: Trajectories, alpha: float) -> np.ndarray:
    """Lambda of each token's run, float64 [N]."""
    length = np.diff(tokens.start)
    return np.repeat(np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(length, 1))), length)
