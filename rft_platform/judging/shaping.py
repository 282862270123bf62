"""What happens to rewards before advantages are made of them: the soft over-long penalty, and rows left out.

Order: the judge's rewards decide which groups have no variance; then the penalty is added; then the threshold of
rewards holds; then, among the runs that are left, that of a group's standard deviation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rft_platform.algorithms.advantages.grpo import spread
from rft_platform.errors import UserError

ZERO_VARIANCE = "zero_variance"  #: ``dropped_by`` of the rows of groups whose runs all have the same reward
REWARD_THRESHOLD = "reward_threshold"  #: ``dropped_by`` of the rows of runs with too low a reward
STD_THRESHOLD = "std_threshold"  #: ``dropped_by`` of the rows of groups whose runs' rewards differ too little
OVERLONG = "overlong"  #: the penalty's part of the reward


@dataclass(frozen=True, slots=True)
class Overlong:
    """The soft over-long penalty (DAPO, arXiv 2503.14476, section 3.4); lengths in tokens of a response."""

    weight: float
    max_length: int
    cache_length: int

    def __post_init__(self) -> None:
        if not 0 < self.cache_length <= self.max_length:
            raise UserError(
                f"the over-long penalty has cache_length {self.cache_length} and max_length {self.max_length}: "
                "expected 0 < cache_length <= max_length"
            )

    def penalty(self, length: np.ndarray) -> np.ndarray:
        """``weight`` times 0 up to ``max - cache``, ``(max - cache - length) / cache`` up to ``max``, -1 beyond."""
        room = self.max_length - self.cache_length - length
        return self.weight * np.clip(room / self.cache_length, -1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Shaping:
    """What an algorithm does with rewards before its advantages."""

    overlong: Overlong | None = None
    drop_zero_variance: bool = False
    reward_threshold: float | None = None
    std_threshold: float | None = None


def shape(
    shaping: Shaping, reward: Sequence[float], length: Sequence[int], group: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """Of R judged runs: the rewards to learn from, the penalty in them, and what leaves a run out (None: nothing).

    ``length`` is that of a run's longest response, ``group`` names its task.
    """
    reward_R = np.asarray(reward, np.float64)
    dropped: list[str | None] = [None] * len(reward_R)
    penalty_R = np.zeros(len(reward_R))
    if shaping.drop_zero_variance and len(reward_R):
        dropped = [ZERO_VARIANCE if flat else None for flat in _without_variance(reward_R, group)]
    if shaping.overlong is not None:
        penalty_R = shaping.overlong.penalty(np.asarray(length))
    shaped_R = reward_R + penalty_R
    if shaping.reward_threshold is not None:
        low_R = shaped_R < shaping.reward_threshold
        dropped = [why or (REWARD_THRESHOLD if low else None) for why, low in zip(dropped, low_R, strict=True)]
    left_R = np.array([why is None for why in dropped], bool)
    if shaping.std_threshold is not None and left_R.any():
        group_R = np.unique(np.asarray(group)[left_R], return_inverse=True)[1]
        for run in np.flatnonzero(left_R)[spread(shaped_R[left_R], group_R) <= shaping.std_threshold]:
            dropped[run] = STD_THRESHOLD
    return shaped_R, penalty_R, dropped


def _without_variance(reward_R: np.ndarray, group: Sequence[str]) -> np.ndarray:
    """bool [R]: whether all runs of the run's group have the same reward."""
    group_R = np.unique(np.asarray(group), return_inverse=True)[1]
    low_G, high_G = np.full(group_R.max() + 1, np.inf), np.full(group_R.max() + 1, -np.inf)
    np.minimum.at(low_G, group_R, reward_R)
    np.maximum.at(high_G, group_R, reward_R)
    flat_R: np.ndarray = (low_G == high_G)[group_R]
    return flat_R
