"""Map rows to runs: a run's outcome is the reward of its last step, and each run counts once in its group."""

import numpy as np


def run_outcomes(
    reward_N: np.ndarray, group_N: np.ndarray, run_N: np.ndarray, step_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``(outcome_R, group_R)`` of every run; ``outcome_R[run_N]`` is the outcome of each row's run."""
    last_R = np.lexsort((step_N, run_N))[np.cumsum(np.bincount(run_N)) - 1]  # row of each run's last step
    return reward_N[last_R], group_N[last_R]


def step_counts(run_N: np.ndarray, step_N: np.ndarray) -> np.ndarray:
    """Number of distinct steps of every run, int64 [R]. Rows with equal run and step are the choices of one call."""
    return np.bincount(np.unique(np.stack([run_N, step_N]), axis=1)[0])
