"""Numbers of an optimiser step that come from its rows and from the machine, and their summary over a training."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rft_platform.training.rows import TrainingRows

#: Lower ends of the staleness histogram's bins, in optimiser steps.
STALENESS_BINS = (0, 1, 4, 8, 16, 32)
_PHASES = ("load", "data", "reference", "old_logprobs", "forward_backward", "optimizer", "save")
_TOTALS = ("cpu_seconds",)
_PEAKS = ("peak_rss_mb", "staleness_max")


class Stopwatch:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PHASES, 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time of the body to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def add(self, other: "Stopwatch") -> None:
        """Add the seconds of another stopwatch."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds


def row_metrics(rows: TrainingRows, chosen: np.ndarray, policy_version: int) -> dict[str, float]:
    """Staleness, truncation and reward of the ``chosen`` rows, which train the policy of ``policy_version``.

    Staleness is the number of optimiser steps between the policy that sampled a row and the one it trains; its
    histogram is given as shares of rows.
    """
    if not rows.facts:
        return {}
    age = policy_version - rows.facts["policy_version"][chosen]
    reward, group = rows.facts["reward"][chosen], rows.group[chosen]
    groups, member = np.unique(group, return_inverse=True)
    high, low = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(high, member, reward)
    np.minimum.at(low, member, reward)
    bins = np.digitize(age, STALENESS_BINS[1:])
    shares = np.bincount(bins, minlength=len(STALENESS_BINS)) / len(chosen)
    return {
        "reward_mean": float(reward.mean()),
        "truncation_rate": float(rows.facts["truncated"][chosen].mean()),
        "zero_variance_groups": float((high == low).mean()),
        "staleness_mean": float(age.mean()),
        "staleness_max": float(age.max()),
        **{f"staleness_from_{low}": float(share) for low, share in zip(STALENESS_BINS, shares, strict=True)},
    }


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def summarise(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One number a metric over all steps: the mean, the sum of processor time, the peak of memory."""
    names = {name: None for step in steps for name in step}
    summary = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        over = sum(values) if name in _TOTALS else max(values) if name in _PEAKS else sum(values) / len(values)
        summary[name] = float(over)
    return summary
