"""Group-in-group advantage for agents that reach the same environment state (GiGPO, arXiv 2505.10978)."""

import numpy as np
from pydantic import NonNegativeFloat

from rft_platform.algorithms.advantages.grpo import EPS, centre
from rft_platform.algorithms.advantages.registry import advantage, run_outcomes
from rft_platform.algorithms.common.registry import Share
from rft_platform.algorithms.token_advantages.registry import discounted
from rft_platform.common.errors import UserError


@advantage("gigpo", min_group=2, needs=("env_state_hash",), reads=("step_reward",))
def gigpo(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    env_state_hash: np.ndarray,
    step_reward: np.ndarray,
    omega: float = 1.0,
    gamma: Share = 0.95,
    normalize_std: bool = False,
    eps: NonNegativeFloat = EPS,
) -> np.ndarray:
    """``A = A_episode + omega A_step``.

    ``A_episode``: the run's outcome, centred over the task's runs; each run counts once. ``A_step``: the step's
    discounted return ``sum_k gamma^k r_(step + k)``, centred over all steps of the task with equal ``env_state_hash``.
    ``A_step`` is 0 for a step whose state no other step of the task has, and for a step without a hash. ``r`` is the
    step's reward (0 if the step has none). The last step of a run also gets the outcome minus all step rewards.
    ``normalize_std`` divides both parts by the standard deviation of their group + ``eps``.

    Raises UserError if no row has an ``env_state_hash``.
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
    return_N = _returns_to_go(outcome_R, run_N, step_N, step_reward, gamma)
    step_A = np.zeros(len(reward_N))
    if known_N.any():
        states = np.stack([group_N, env_state_hash])[:, known_N]
        state = np.unique(states, axis=1, return_inverse=True)[1].reshape(-1)
        step_A[known_N] = centre(return_N[known_N], state, normalize_std=normalize_std, eps=eps)
    return episode_R[run_N] + omega * step_A


def _returns_to_go(
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
