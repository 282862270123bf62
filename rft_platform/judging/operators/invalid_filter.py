"""Leave out runs from which nothing can be learned."""

from typing import Annotated

import numpy as np
from pydantic import Field

from rft_platform.judging.operators.experiences import Change, Experiences
from rft_platform.judging.operators.registry import operator


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
