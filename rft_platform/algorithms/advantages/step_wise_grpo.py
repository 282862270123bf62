"""Group-relative advantage of multi-step runs: one outcome per run, broadcast to its steps."""

import numpy as np
from pydantic import NonNegativeFloat

from rft_platform.algorithms.advantages.grpo import EPS, StdLevel, normalised, spread
from rft_platform.algorithms.advantages.registry import advantage, run_outcomes, step_counts


@advantage("step_wise_grpo", min_group=2, drops_at="std_threshold")
def step_wise_grpo(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    normalize_std: bool = True,
    std_level: StdLevel = "group",
    eps: NonNegativeFloat = EPS,
    step_norm: bool = False,
    std_threshold: float | None = None,
) -> np.ndarray:
    """GRPO over runs: each run counts once; its outcome is the reward of its last step.

    With ``std_level`` "batch" the standard deviation is that of all runs that are judged together.
    ``step_norm`` divides by the run's number of steps (choices of one call are one step). In groups whose outcomes have
    a standard deviation of at most ``std_threshold``, the advantage is 0; when a round is judged, the operator
    ``std_filter`` also leaves the rows of these groups out of training.
    """
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    advantage_R = normalised(outcome_R, group_R, normalize_std=normalize_std, std_level=std_level, eps=eps)
    if std_threshold is not None:
        advantage_R = np.where(spread(outcome_R, group_R) > std_threshold, advantage_R, 0.0)
    if step_norm:
        advantage_R = advantage_R / step_counts(run_N, step_N)
    return advantage_R[run_N]
