"""Discounted returns of steps: step rewards where the environment gave them, the rest of the outcome at the end."""

import numpy as np

from rft_platform.algorithms.token_advantages.discount import discounted


def returns_to_go(
    outcome_R: np.ndarray, run_N: np.ndarray, step_N: np.ndarray, step_reward_N: np.ndarray, gamma: float
) -> np.ndarray:
    """``G_k = r_k + gamma^(steps between) G_(next step)`` of every row's step, float64 [N].

    ``r`` is the step's reward (NaN: none). The last step also gets the run's outcome minus all step rewards, so that
    the undiscounted sum is the outcome. Rows of one step (the choices of one call) share reward and return.
    """
    if not len(run_N):
        return np.zeros(0)
    places = np.stack([run_N, step_N])
    (run_K, step_K), first, step_of_N = np.unique(places, axis=1, return_index=True, return_inverse=True)
    reward_K = np.nan_to_num(step_reward_N[first], nan=0.0)
    end = np.append(np.flatnonzero(np.diff(run_K)) + 1, len(run_K))  # end of each run; runs are numbered from 0
    reward_K[end - 1] += outcome_R - np.bincount(run_K, reward_K)
    apart = np.append(np.diff(step_K), 0)
    apart[end - 1] = 0
    return discounted(reward_K, np.append(0, end), np.power(gamma, apart))[step_of_N.reshape(-1)]
