"""Shape rewards: combine the judge's reward with other measures of a run."""

from collections.abc import Mapping

import numpy as np

from rft_platform.algorithms.common.registry import unknown_name
from rft_platform.common.errors import UserError
from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator


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
    workflow; 0 for a run without it). The change of the reward is stored as the reward part ``shaping``.
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
    """float64 [R]: the measure ``name`` of every run. Raises UserError if no run has it."""
    known = {
        "response_tokens": experiences.tokens_R,
        "longest_response": experiences.longest_R,
        "calls": experiences.calls_R,
        "truncated": experiences.truncated_R,
        **{f"parts.{part}": values for part, values in experiences.parts.items()},
        **{f"metrics.{metric}": values for metric, values in experiences.metrics.items()},
    }
    if name not in known and len(experiences.run_ids) == 0:
        return np.zeros(0)
    if name not in known:
        raise UserError(unknown_name("measure of experience operator 'reward_shaping'", name, known))
    return np.nan_to_num(known[name].astype(np.float64), nan=0.0)
