"""Discounted backward sums over runs."""

import numpy as np


def discounted(values: np.ndarray, start: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """``y_t = x_t + decay_t * y_{t+1}`` within each run, float64 [N]; run r has the tokens ``start[r]:start[r + 1]``.

    The loop goes through positions, counted from the end of each run, and handles all runs at once. Runs are sorted by
    decreasing length, so the runs that have a token at a position come first.
    """
    out = np.array(values, np.float64)
    decay = np.broadcast_to(decay, out.shape)
    length = np.diff(start)
    order = np.argsort(-length, kind="stable")
    last, length = start[1:][order] - 1, length[order]
    reaching = np.searchsorted(-length, -np.arange(length[0] if len(length) else 0), side="left")  # runs longer than t
    for back, runs in enumerate(reaching.tolist()[1:], start=1):
        at = last[:runs] - back
        out[at] += decay[at] * out[at + 1]
    return out
