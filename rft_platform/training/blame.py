"""Which rows and parameters make a step's loss or gradient infinite or NaN: found by halving the step."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rft_platform.errors import NAMED
from rft_platform.training.shards import local_part
from rft_platform.training.step import Reduce

Probe = Callable[[np.ndarray], bool]
"""``rows -> whether loss and gradient of these alone are finite``; on all ranks alike."""

_PROBES = 64


def culprits(units: Sequence[np.ndarray], is_finite: Probe) -> list[np.ndarray]:
    """Up to five of ``units`` (rows that are evaluated together) that are not finite even by themselves.

    Every rank gets the same answers from ``is_finite``, so all of them halve alike. With one culprit among n units it
    takes about 2 log2(n) probes of together twice the step. Empty where only the whole overflows.
    """
    found: list[np.ndarray] = []
    parts = [list(units)]
    for _ in range(_PROBES):
        if not parts or len(found) == NAMED:
            break
        part = parts.pop()
        if is_finite(np.concatenate(part)):
            continue
        if len(part) == 1:
            found.append(part[0])
        else:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    return found


def not_finite(tensors: Iterable[tuple[str, Tensor | None]], reduce: Reduce) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity on any rank; every rank must give the same names."""
    named = list(tensors)
    bad = [0.0 if value is None or torch.isfinite(local_part(value)).all() else 1.0 for _, value in named]
    anywhere = reduce(torch.tensor(bad, dtype=torch.float64), "max").tolist()
    return [name for (name, _), is_bad in zip(named, anywhere, strict=True) if is_bad]
