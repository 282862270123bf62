"""Baseline of online policy mirror descent (Kimi k1.5, arXiv 2501.12599, section 2.3.2; Trinity-RFT, 2505.17826)."""

from typing import Literal

import numpy as np
from pydantic import PositiveFloat

from rft_platform.algorithms.advantages.grpo import centre
from rft_platform.algorithms.advantages.registry import advantage, run_outcomes


@advantage("opmd")
def opmd(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    baseline: Literal["mean", "logavgexp"] = "mean",
    tau: PositiveFloat = 1.0,
) -> np.ndarray:
    """``A = R - b`` with b the group's mean or ``tau log mean exp(R / tau)``; each run counts once.

    A group of one has baseline 0: A = R. In other groups equal outcomes give exactly 0.
    """
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    if baseline == "mean":
        centred_R = centre(outcome_R, group_R, normalize_std=False)
    else:
        centred_R = outcome_R - _logavgexp(outcome_R, group_R, tau)[group_R]
    alone_R = (np.bincount(group_R) == 1)[group_R]
    return np.where(alone_R, outcome_R, centred_R)[run_N]


def _logavgexp(outcome_R: np.ndarray, group_R: np.ndarray, tau: float) -> np.ndarray:
    """``tau log mean exp(R / tau)`` of each group. The largest outcome is factored out so that exp stays finite."""
    high_G = np.full(len(np.bincount(group_R)), -np.inf)
    np.maximum.at(high_G, group_R, outcome_R)
    mean_G = np.bincount(group_R, weights=np.exp((outcome_R - high_G[group_R]) / tau)) / np.bincount(group_R)
    baseline_G: np.ndarray = high_G + tau * np.log(mean_G)
    return baseline_G
