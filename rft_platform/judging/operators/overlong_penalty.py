"""The soft over-long penalty (DAPO, arXiv 2503.14476, section 3.4). Lengths are tokens of a response."""

from typing import Annotated

import numpy as np
from pydantic import Field

from rft_platform.common.errors import UserError
from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

OVERLONG_PENALTY = "overlong_penalty"
OVERLONG = "overlong"  #: name of the penalty's part of the reward


@operator(OVERLONG_PENALTY)
def overlong_penalty(
    experiences: Experiences,
    *,
    max_length: Annotated[int, Field(ge=1)],
    cache_length: Annotated[int, Field(ge=1)],
    weight: Annotated[float, Field(ge=0)] = 1.0,
) -> Change:
    """Add a penalty to the reward: 0 up to ``max - cache`` tokens, falling to ``-weight`` at ``max`` and beyond.

    The longest response of a run counts.
    """
    penalty_R = weight * penalty(experiences.longest_R, max_length, cache_length)
    return Change(
        reward=experiences.reward_R + penalty_R,
        parts={OVERLONG: penalty_R},
        facts={"penalised_runs": float(((penalty_R < 0) & experiences.kept_R).sum())},
    )


def penalty(length: np.ndarray, max_length: int, cache_length: int) -> np.ndarray:
    """0 up to ``max - cache``, ``(max - cache - length) / cache`` up to ``max``, -1 beyond.

    Raises UserError unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise UserError(
            f"the over-long penalty has cache_length {cache_length} and max_length {max_length}: "
            "expected 0 < cache_length <= max_length"
        )
    return np.clip((max_length - cache_length - length) / cache_length, -1.0, 0.0)
