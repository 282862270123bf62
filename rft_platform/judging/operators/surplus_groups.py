"""The last step of dynamic sampling: leave out groups beyond the number that the round needs."""

import numpy as np

from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

SURPLUS_GROUPS = "surplus_groups"


@operator(SURPLUS_GROUPS)
def surplus_groups(experiences: Experiences) -> Change:
    """Keep the first ``buffer.batch_size * sync_interval`` groups that have a kept run, in the order of sampling.

    A choice by reward instead of by order would bias the training.
    """
    if experiences.wanted_groups is None:
        return Change()
    alive_G = np.bincount(experiences.group_R[experiences.kept_R], minlength=len(experiences.group_ids)) > 0
    beyond_G = alive_G & (np.cumsum(alive_G) > experiences.wanted_groups)
    return Change(drop=beyond_G[experiences.group_R], facts={"surplus_groups": float(beyond_G.sum())})
