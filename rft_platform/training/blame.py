"""Find the rows and parameters that make a step's loss or gradient infinite or NaN, by bisecting the step's rows."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rft_platform.errors import NAMED
from rft_platform.training.shards import local_part
from rft_platform.training.step import Reduce

Probe = Callable[[np.ndarray], bool]
"""``rows -> whether their loss and gradient alone are finite``; the same answer on all ranks."""

_PROBES = 64


def culprits(units: Sequence[np.ndarray], is_finite: Probe) -> list[np.ndarray]:
    """Return up to five ``units`` (rows that are evaluated together) that are not finite even on their own.

    Every rank gets the same answers from ``is_finite``, so all ranks bisect in the same way. One culprit among n units
    takes about 2 log2(n) probes, which together cost twice the step. The list is empty if only the whole step
    overflows.
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
    """Return the names of tensors that hold a NaN or an infinity on any rank. Every rank must pass the same names."""
    named = list(tensors)
    bad = [0.0 if value is None or torch.isfinite(local_part(value)).all() else 1.0 for _, value in named]
    anywhere = reduce(torch.tensor(bad, dtype=torch.float64), "max").tolist()
    return [name for (name, _), is_bad in zip(named, anywhere, strict=True) if is_bad]
