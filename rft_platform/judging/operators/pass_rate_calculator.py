"""Compute how often each task was solved, and store the rate as reward parts, which task selectors read."""

import numpy as np

from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator

PASSED = "passed"  #: reward part of a run: 1 if it solved its task


@operator("pass_rate_calculator")
def pass_rate_calculator(experiences: Experiences, *, pass_reward: float = 1.0) -> Change:
    """Add to each run the parts ``passed`` (judge's reward at least ``pass_reward``) and ``pass_rate`` of its task.

    All runs of the task count, also those that another operator leaves out; rewards do not change.
    """
    passed_R = (experiences.judged_R >= pass_reward).astype(np.float64)
    groups = len(experiences.group_ids)
    runs_G = np.maximum(np.bincount(experiences.group_R, minlength=groups), 1)
    rate_G = np.bincount(experiences.group_R, weights=passed_R, minlength=groups) / runs_G
    return Change(
        parts={PASSED: passed_R, "pass_rate": rate_G[experiences.group_R]},
        facts={
            "pass_rate": float(rate_G.mean()) if groups else 0.0,
            "solved_tasks": float((rate_G == 1).sum()),
            "unsolved_tasks": float((rate_G == 0).sum()),
        },
    )
