"""Operators that change rewards or add parts to them.

- ``reward_shaping``: combine the judge's reward with other measures of a run.
- ``overlong_penalty``: the soft over-long penalty (DAPO, arXiv 2503.14476, section 3.4), by tokens of a response.
- ``pass_rate_calculator``: how often each task was solved, as reward parts, which task selectors read.
"""

import logging
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field

from rft_platform.algorithms.common.registry import unknown_name
from rft_platform.common.errors import UserError
from rft_platform.experience.record import REWARD_ROUNDING
from rft_platform.judging.operators.registry import Change, Experiences, operator

_log = logging.getLogger(__name__)


@operator("reward_shaping")
def reward_shaping(
    experiences: Experiences,
    *,
    add: Mapping[str, float] | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    clip: tuple[float, float] | None = None,
) -> Change:
    """Set every run's reward to ``clip(scale * reward + offset + sum of weight * measure)``.

    ``add`` gives the weight of each measure: ``response_tokens`` (of all responses of a run), ``longest_response``,
    ``calls``, ``truncated`` (0 or 1), ``parts.<name>`` (a part of the reward) or ``metrics.<name>`` (a metric of the
    workflow). A part or metric is 0 for a run without it; if no run has it, a warning is logged. The change of the
    reward is stored as the reward part ``shaping``.
    """
    if clip is not None and not clip[0] < clip[1]:
        raise UserError(f"experience operator 'reward_shaping': clip {list(clip)}: expected [low, high], low < high")
    shaped_R = scale * experiences.reward_R + offset
    for name, weight in (add or {}).items():
        shaped_R = shaped_R + weight * measure(experiences, name)
    if clip is not None:
        shaped_R = np.clip(shaped_R, *clip)
    return Change(reward=shaped_R, parts={"shaping": shaped_R - experiences.reward_R})


def measure(experiences: Experiences, name: str) -> np.ndarray:
    """float64 [R]: the measure ``name`` of every run. Raises UserError if ``name`` is no measure."""
    known = {
        "response_tokens": experiences.tokens_R,
        "longest_response": experiences.longest_R,
        "calls": experiences.calls_R,
        "truncated": experiences.truncated_R,
        **{f"parts.{part}": values for part, values in experiences.parts.items()},
        **{f"metrics.{metric}": values for metric, values in experiences.metrics.items()},
    }
    if name not in known:
        unknown = unknown_name("measure of experience operator 'reward_shaping'", name, known)
        if not name.startswith(("parts.", "metrics.")):
            raise UserError(unknown)
        if len(experiences.run_ids) > 0:
            _log.warning("no run has %s, which counts as 0; %s", name, unknown)
        return np.zeros(len(experiences.run_ids))
    return np.nan_to_num(known[name].astype(np.float64), nan=0.0)


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


PASSED = "passed"  #: reward part of a run: 1 if it solved its task


@operator("pass_rate_calculator")
def pass_rate_calculator(experiences: Experiences, *, pass_reward: float = 1.0) -> Change:
    """Add to each run the parts ``passed`` (judge's reward at least ``pass_reward``) and ``pass_rate`` of its task.

    All runs of the task count, also those that another operator leaves out; rewards do not change.
    """
    passed_R = (experiences.judged_R >= pass_reward - REWARD_ROUNDING).astype(np.float64)
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
