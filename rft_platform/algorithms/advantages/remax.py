"""Greedy baseline (ReMax: Li et al., "A Simple, Effective, and Efficient RL Method for Aligning LLMs", 2310.10505)."""

import numpy as np

from rft_platform.algorithms.advantages.registry import advantage, run_outcomes
from rft_platform.common.errors import UserError


@advantage("remax", min_group=2, reads=("temperature",), greedy_run=True)
def remax(
    reward_N: np.ndarray, group_N: np.ndarray, run_N: np.ndarray, step_N: np.ndarray, *, temperature: np.ndarray
) -> np.ndarray:
    """``A_i = R_i - R_greedy`` with the outcome of the task's greedy run, broadcast to the run's steps.

    A run is greedy if all its calls have temperature 0. Greedy runs have the advantage 0; so have the runs of a group
    whose greedy run failed. Raises UserError if no group has a greedy run.
    """
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    sampled_R = np.zeros(len(outcome_R), bool)
    np.logical_or.at(sampled_R, run_N, temperature != 0)
    if len(outcome_R) and sampled_R.all():
        raise UserError(
            "advantage function 'remax': no run was decoded greedily, so there is no baseline. The first run of each "
            "task has temperature 0 unless the workflow sets a temperature in its calls: let it leave the temperature "
            "out"
        )
    baseline_G = np.full(group_R.max(initial=-1) + 1, np.nan)
    baseline_G[group_R[~sampled_R]] = outcome_R[~sampled_R]
    advantage_R = np.where(sampled_R, outcome_R - baseline_G[group_R], 0.0)
    return np.nan_to_num(advantage_R, nan=0.0)[run_N]
