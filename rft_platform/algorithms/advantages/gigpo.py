"""Group-in-group advantage of agents that meet the same state of an environment (GiGPO, arXiv 2505.10978)."""

import numpy as np

from rft_platform.algorithms.advantages.grpo import EPS, centre
from rft_platform.algorithms.advantages.outcomes import run_outcomes
from rft_platform.algorithms.advantages.registry import advantage
from rft_platform.algorithms.registry import Share
from rft_platform.errors import UserError


@advantage("gigpo", min_group=2, needs=("env_state_hash",))
def gigpo(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    env_state_hash: np.ndarray,
    omega: float = 1.0,
    gamma: Share = 0.95,
    normalize_std: bool = False,
    eps: float = EPS,
) -> np.ndarray:
    """``A = A_episode + omega A_step``.

    ``A_episode``: the run's outcome centred over the task's runs, each run counted once. ``A_step``: the discounted
    return from that step on, ``gamma^(steps to the run's end) R`` (the reward comes at the end), centred over all steps
    of the task with equal ``env_state_hash``; a step whose state no other step of the task has gets 0, and so does one
    without a hash. ``normalize_std`` divides both by their group's standard deviation + ``eps``.

    Raises UserError where no row has an ``env_state_hash``.
    """
    known_N = env_state_hash >= 0
    if len(known_N) and not known_N.any():
        raise UserError(
            "advantage function 'gigpo' compares steps in equal states of the environment, but no rollout row has an "
            "env_state_hash: let the workflow call model.set_env_state(...) before each model call, or use "
            "step_wise_grpo"
        )
    outcome_R, group_R = run_outcomes(reward_N, group_N, run_N, step_N)
    episode_R = centre(outcome_R, group_R, normalize_std=normalize_std, eps=eps)
    return_N = gamma ** _steps_to_end(run_N, step_N) * outcome_R[run_N]
    step_A = np.zeros(len(reward_N))
    if known_N.any():
        states = np.stack([group_N, env_state_hash])[:, known_N]
        state = np.unique(states, axis=1, return_inverse=True)[1].reshape(-1)
        step_A[known_N] = centre(return_N[known_N], state, normalize_std=normalize_std, eps=eps)
    return episode_R[run_N] + omega * step_A


def _steps_to_end(run_N: np.ndarray, step_N: np.ndarray) -> np.ndarray:
    """How many steps of the run follow each row, by their order; rows of one step number share it."""
    last_R = np.full(len(np.bincount(run_N)), -1, np.int64)
    np.maximum.at(last_R, run_N, step_N)
    return last_R[run_N] - step_N
