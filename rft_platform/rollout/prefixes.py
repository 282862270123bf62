"""Count the prompt tokens that repeat earlier calls of a run: a packer and a prefix cache compute them only once."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rft_platform.experience.record import RolloutRow

_LOOKED_BACK = 8  # calls: sub-agents take turns, so a call may continue another than the previous one

Ids = npt.NDArray[np.int32]


def shared_prefix_tokens(rows: Iterable[RolloutRow]) -> tuple[int, int]:
    """Return (prompt tokens of later calls that continue an earlier call of their run, prompt tokens of later calls).

    A call continues another as far as its prompt begins with the other's prompt and answer, token for token: an agent
    that appends to its history shares nearly all, one that rewrites it (or whose template does) shares little. The rows
    of a run must be adjacent, as the runner returns them. A call with several choices counts once.
    """
    shared = total = 0
    for _, run in groupby(rows, key=lambda row: row.run_id):
        earlier: list[Ids] = []
        for step, call in groupby(run, key=lambda row: row.step):
            choices = list(call)
            prompt = np.asarray(choices[0].prompt_ids, np.int32)
            if step > 0:
                total += len(prompt)
                shared += _longest(prompt, earlier)
            earlier += [np.asarray([*row.prompt_ids, *row.response_ids], np.int32) for row in choices]
            del earlier[:-_LOOKED_BACK]
    return shared, total


def _longest(prompt: Ids, earlier: Sequence[Ids]) -> int:
    """Length of the longest prefix that ``prompt`` shares with any of the ``earlier`` sequences."""
    longest = 0
    for other in reversed(earlier):
        size = min(len(prompt), len(other))
        differ = np.flatnonzero(prompt[:size] != other[:size])
        longest = max(longest, int(differ[0]) if len(differ) else size)
        if longest == size:
            break
    return longest
