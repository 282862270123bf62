"""Leave-one-out baseline (RLOO: Ahmadian et al., "Back to Basics", arXiv 2402.14740)."""

import numpy as np

from rft_platform.algorithms.advantages.grpo import centre
from rft_platform.algorithms.advantages.registry import advantage, run_outcomes


@advantage("rloo", min_group=2)
def rloo(reward_N: np.ndarray, group_N: np.ndarray, run_N: np.ndarray, step_N: np.ndarray) -> np.ndarray:
    """``A_i = R_i - mean of the group's other runs = n / (n - 1) (R_i - mean)``; each run counts once.

    ``R`` is the run's outcome, broadcast to its steps. A group of one, or with equal outcomes, gives 0.
    """
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    runs_G = np.bincount(group_R)
    factor_G = runs_G / np.maximum(runs_G - 1, 1)
    return (factor_G[group_R] * centre(outcome_R, group_R, normalize_std=False))[run_N]
