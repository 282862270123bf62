"""Mask responses that ended at their token limit, leave out their runs, or penalise the runs."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

TRUNCATED_MASK = "truncated_mask"


@operator(TRUNCATED_MASK)
def truncated_mask(
    experiences: Experiences,
    *,
    mode: Literal["mask", "drop", "penalise"] = "mask",
    penalty: Annotated[float, Field(gt=0)] = 1.0,
) -> Change:
    """Mask truncated responses, leave out their runs, or penalise the runs.

    ``mask`` (over-long filtering, DAPO, arXiv 2503.14476, section 3.4): truncated rows are not trained on; the run's
    reward still counts in its group. ``drop``: runs with a truncated response are left out. ``penalise``: the reward of
    such runs is reduced by ``penalty`` (reward part ``truncated``).
    """
    facts = {"truncated_runs": float((experiences.truncated_R & experiences.kept_R).sum())}
    if mode == "mask":
        return Change(mask=experiences.truncated_N, facts=facts)
    if mode == "drop":
        return Change(drop=experiences.truncated_R, facts=facts)
    part = np.where(experiences.truncated_R, -penalty, 0.0)
    return Change(reward=experiences.reward_R + part, parts={"truncated": part}, facts=facts)
