"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): drop groups whose runs all have the same reward."""

from typing import Annotated, Literal

from pydantic import Field

from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

DYNAMIC_SAMPLING = "dynamic_sampling"  #: the value of ``dropped_by`` for groups without a learning signal


@operator(DYNAMIC_SAMPLING)
def dynamic_sampling(
    experiences: Experiences,
    *,
    max_batches: Annotated[int, Field(ge=1)] = 1,
    of: Literal["judged", "reward"] = "judged",
) -> Change:
    """Leave out groups whose kept runs all have the same reward.

    ``of: judged`` compares the judge's rewards, ``of: reward`` the rewards after the operators before this one. If
    ``max_batches`` is above 1, exploration samples further batches of tasks to replace such groups.
    """
    low_G, high_G = experiences.by_group(experiences.judged_R if of == "judged" else experiences.reward_R)
    without_G = low_G >= high_G
    return Change(drop=without_G[experiences.group_R], facts={"groups_without_signal": float((low_G == high_G).sum())})
