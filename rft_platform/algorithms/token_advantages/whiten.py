"""Whiten values over the valid tokens of all ranks."""

from collections.abc import Callable

import numpy as np

EPS = 1e-8
_ROUNDING = 1e-9  # a standard deviation below this share of the mean is rounding noise and counts as 0

Sum = Callable[[np.ndarray], np.ndarray]
"""Sum of a float64 vector over all ranks; every rank gets the result."""


def whiten(values: np.ndarray, share: np.ndarray, total: Sum | None = None) -> np.ndarray:
    """``(x - mean) / sqrt(var + 1e-8)`` with the sample (n - 1) variance; exactly 0 if all x are equal.

    ``share`` [N] is the weight of each token on this rank: 1 / number of ranks that have the token.
    """
    total = total or _one_rank
    count, summed = total(np.array([share.sum(), values @ share]))
    mean = summed / max(count, 1.0)
    centred = values - mean
    (squares,) = total(np.array([np.square(centred) @ share]))
    variance = squares / max(count - 1.0, 1.0)
    if variance <= (_ROUNDING * mean) ** 2:
        return np.zeros_like(values)
    return centred / np.sqrt(variance + EPS)


def _one_rank(values: np.ndarray) -> np.ndarray:
    return values
