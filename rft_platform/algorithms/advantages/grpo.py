"""Group-relative advantage (DeepSeekMath, arXiv 2402.03300; without division by the deviation: arXiv 2503.20783)."""

from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat

from rft_platform.algorithms.advantages.registry import advantage

EPS = 1e-6
StdLevel = Literal["group", "batch"]


@advantage("grpo", min_group=2)
def grpo(
    reward_N: np.ndarray,
    group_N: np.ndarray,
    run_N: np.ndarray,
    step_N: np.ndarray,
    *,
    normalize_std: bool = True,
    std_level: StdLevel = "group",
    eps: NonNegativeFloat = EPS,
) -> np.ndarray:
    """``(R - mean) / (std + eps)`` within each group; every row counts. ``normalize_std=False`` only centres.

    With ``std_level`` "batch", ``std`` is that of all rewards that are judged together (arXiv 2508.08221).
    """
    return normalised(reward_N, group_N, normalize_std=normalize_std, std_level=std_level, eps=eps)


def normalised(
    reward_N: np.ndarray, group_N: np.ndarray, *, normalize_std: bool, std_level: StdLevel, eps: float
) -> np.ndarray:
    """``centre`` with the standard deviation of each group or of all rewards."""
    if not normalize_std or std_level == "group":
        return centre(reward_N, group_N, normalize_std=normalize_std, eps=eps)
    everything = np.zeros(len(reward_N), np.int64)
    return _divided(centre(reward_N, group_N, normalize_std=False), spread(reward_N, everything) + eps)


def centre(reward_N: np.ndarray, group_N: np.ndarray, *, normalize_std: bool = True, eps: float = EPS) -> np.ndarray:
    """Centre ``reward_N`` within groups; with ``normalize_std`` divide by the sample standard deviation + ``eps``.

    A group whose rewards are all equal (also a group of one) gives exactly 0. Without this rule, the division would
    amplify the rounding error of the mean.
    """
    count_G = np.bincount(group_N)
    mean_G = np.bincount(group_N, weights=reward_N) / count_G
    low_G, high_G = np.full(len(count_G), np.inf), np.full(len(count_G), -np.inf)
    np.minimum.at(low_G, group_N, reward_N)
    np.maximum.at(high_G, group_N, reward_N)
    advantage_N = np.where((high_G > low_G)[group_N], reward_N - mean_G[group_N], 0.0)
    return _divided(advantage_N, (sample_std(advantage_N, group_N) + eps)[group_N]) if normalize_std else advantage_N


def _divided(centred_N: np.ndarray, by_N: np.ndarray) -> np.ndarray:
    """The quotient; 0 where the divisor is 0, which happens with equal rewards and ``eps`` 0."""
    return np.divide(centred_N, by_N, out=np.zeros_like(centred_N), where=by_N > 0)


def spread(reward_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
    """For every row, the sample standard deviation of its group's rewards."""
    std_N: np.ndarray = sample_std(centre(reward_N, group_N, normalize_std=False), group_N)[group_N]
    return std_N


def sample_std(centred_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
    """Sample (n - 1) standard deviation of each group of centred values; 0 for a group of one."""
    squares_G = np.bincount(group_N, weights=centred_N**2)
    return np.sqrt(squares_G / np.maximum(np.bincount(group_N) - 1, 1))
