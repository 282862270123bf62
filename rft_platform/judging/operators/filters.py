"""Operators that leave out runs or whole groups, or mask responses.

- ``reward_filter``: rejection sampling, by the reward of a run.
- ``std_filter``: groups whose rewards differ too little; ``dynamic_sampling`` (DAPO, arXiv 2503.14476, section 3.2):
  groups whose runs all have the same reward; ``surplus_groups``: groups beyond the number that the round needs.
- ``invalid_filter``: runs from which nothing can be learned; ``truncated_mask``: responses that ended at their limit.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rft_platform.algorithms.advantages.grpo import spread
from rft_platform.common.errors import UserError
from rft_platform.experience.record import REWARD_ROUNDING
from rft_platform.judging.operators.registry import Change, Experiences, operator

REWARD_FILTER = "reward_filter"


@operator(REWARD_FILTER)
def reward_filter(
    experiences: Experiences, *, threshold: float | None = None, max_reward: float | None = None
) -> Change:
    """Leave out runs whose reward is below ``threshold`` or above ``max_reward``."""
    if threshold is None and max_reward is None:
        raise UserError("experience operator 'reward_filter': give threshold, max_reward or both")
    low = -np.inf if threshold is None else threshold
    high = np.inf if max_reward is None else max_reward
    too_low = experiences.reward_R < low - REWARD_ROUNDING
    return Change(drop=too_low | (experiences.reward_R > high + REWARD_ROUNDING))


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


@operator("invalid_filter")
def invalid_filter(
    experiences: Experiences,
    *,
    empty: bool = True,
    max_response_tokens: Annotated[int, Field(ge=1)] | None = None,
    max_calls: Annotated[int, Field(ge=1)] | None = None,
) -> Change:
    """Leave out runs whose reward is not finite, and by option further invalid runs.

    ``empty``: runs with an empty last answer (no text and no tool call) or a response without tokens.
    ``max_response_tokens``: runs with a longer response. ``max_calls``: runs with more model calls.
    """
    shortest = np.full(len(experiences.run_ids), np.iinfo(np.int64).max)
    np.minimum.at(shortest, experiences.run_N, experiences.length_N)
    faults = {
        "not_finite": ~np.isfinite(experiences.reward_R),
        "empty": (experiences.empty_R | (shortest == 0)) & empty,
        "too_long": experiences.longest_R > (max_response_tokens or np.inf),
        "too_many_calls": experiences.calls_R > (max_calls or np.inf),
    }
    drop = np.logical_or.reduce(list(faults.values()))
    return Change(drop=drop, facts={name: float((bad & experiences.kept_R).sum()) for name, bad in faults.items()})


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
    low_G, high_G = experiences.range_by_group(experiences.judged_R if of == "judged" else experiences.reward_R)
    without_G = low_G >= high_G
    return Change(drop=without_G[experiences.group_R], facts={"groups_without_signal": float((low_G == high_G).sum())})


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
