"""Asymmetric baseline of off-policy REINFORCE (AsymRE, Arnal et al., arXiv 2506.20520)."""

from typing import Annotated

import numpy as np
from pydantic import Field

from rft_platform.algorithms.advantages.grpo import centre
from rft_platform.algorithms.advantages.registry import advantage, run_outcomes


@advantage("asymre", min_group=2)
def asymre(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    baseline_shift: Annotated[float, Field(le=0)] = -0.1,
) -> np.ndarray:
    """``A = R - (mean + baseline_shift)`` over the group's runs; each run counts once.

    A baseline below the mean gives good runs more weight than bad ones. The paper shows that training on data of
    another policy is stable only with such a baseline. If all runs of a group have equal outcomes, their advantage is
    ``-baseline_shift``, so they are imitated. A group of one has baseline 0.
    """
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    alone_R = (np.bincount(group_R) == 1)[group_R]
    centred_R = centre(outcome_R, group_R, normalize_std=False)
    return np.where(alone_R, outcome_R, centred_R - baseline_shift)[run_N]
