"""Leave out groups whose rewards differ too little."""

from typing import Annotated

import numpy as np
from pydantic import Field

from rft_platform.algorithms.advantages.grpo import spread
from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

STD_FILTER = "std_filter"


@operator(STD_FILTER)
def std_filter(experiences: Experiences, *, threshold: Annotated[float, Field(ge=0)] = 0.0) -> Change:
    """Leave out groups whose kept runs' rewards have a sample standard deviation at or below ``threshold``.

    Threshold 0 leaves out groups without variance; a group of one run has a deviation of 0.
    """
    drop, kept = np.zeros(len(experiences.run_ids), bool), experiences.kept_R
    if kept.any():
        group = np.unique(experiences.group_R[kept], return_inverse=True)[1]
        drop[kept] = spread(experiences.reward_R[kept], group) <= threshold
    return Change(drop=drop)
