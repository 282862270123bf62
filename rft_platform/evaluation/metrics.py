"""Scores of an evaluation: mean@n, stderr@n, std@n, best@k, worst@k, and pass rates with confidence intervals.

A score table maps each task to the scores of its runs. Tasks may have different numbers of runs (a failed run has no
score). Names of NumPy shapes: T (tasks), N (runs of a task), B (bootstrap draws).

Pass rates have score intervals, which stay valid at 0 % and 100 % and for few tasks (a bootstrap of equal values would
return an interval of width 0):

- one policy: Wilson, JASA 22 (1927) 209, with the effective sample size of clustered data (Korn and Graubard, Survey
  Methodology 24 (1998) 193; Dean and Pagano, Stat. Med. 34 (2015) 1815), because runs of one task are correlated.
- the difference of two policies: Agresti and Min, Stat. Med. 24 (2005) 729, which adds two pseudo-tasks, spread evenly
  over the four possible pairs of outcomes.

Differences of mean rewards, which have no bounds, have the interval of Student's t, with one pseudo-task.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from rft_platform.experience.record import REWARD_ROUNDING

if TYPE_CHECKING:
    import numpy as np

BOOTSTRAP_SEED = 42
BOOTSTRAP_DRAWS = 1000
_Z = NormalDist().inv_cdf(0.975)  # quantile of a two-sided 95 % interval

Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class PassRate:
    """A share of passed runs (the mean of the tasks' shares) and its 95 % interval over tasks."""

    value: float
    low: float
    high: float
    tasks: int
    runs: int


def pass_rate(scores: Scores, threshold: float = 1.0) -> PassRate:
    """Share of runs whose score reaches ``threshold``, with Wilson's interval for the effective number of runs."""
    import numpy as np

    if not scores:
        raise ValueError("pass rate: there are no tasks; at least one scored run is needed")
    shares_T = np.array([np.mean(np.asarray(runs) >= threshold - REWARD_ROUNDING) for runs in scores.values()])
    runs, value = sum(len(runs) for runs in scores.values()), float(shares_T.mean())
    low, high = _wilson(value, _effective_size(shares_T, runs))
    return PassRate(value, low, high, len(shares_T), runs)


def _effective_size(shares_T: "np.ndarray", runs: int) -> float:
    """Effective number of independent runs, from the number of tasks (runs of a task always agree) to ``runs``.

    If every task has the same share of passed runs, the correlation of a task's runs is unknown: each task counts as
    one run.
    """
    tasks, value = len(shares_T), float(shares_T.mean())
    variance = float(shares_T.var(ddof=1)) / tasks if tasks > 1 else 0.0
    if variance == 0.0:
        return float(tasks)
    return min(max(value * (1 - value) / variance, float(tasks)), float(runs))


def _wilson(value: float, size: float) -> tuple[float, float]:
    centre = (value + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z / (1 + _Z**2 / size) * math.sqrt(value * (1 - value) / size + _Z**2 / (4 * size**2))
    return min(max(centre - half, 0.0), value), max(min(centre + half, 1.0), value)


def paired_share_interval(shares: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of ``shares - others``, pass rates on the same tasks, with the 95 % interval."""
    import numpy as np

    differences_T = np.asarray(shares, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    size = len(differences_T) + 2.0  # two pseudo-tasks: weight 1 without a difference, 1/2 with +1, 1/2 with -1
    centre = float(differences_T.sum()) / size
    variance = (float((differences_T**2).sum()) + 1.0) / size - centre**2
    half = _Z * math.sqrt(variance / size)
    return float(differences_T.mean()), max(centre - half, -1.0), min(centre + half, 1.0)


def paired_interval(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of ``scores - others``, one pair per task, with the 95 % interval of Student's t over tasks.

    The spread is that of the tasks and of a pseudo-task without a difference. So equal differences do not have an
    interval of width 0, and the interval of fewer than four tasks always includes 0.
    """
    import numpy as np
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    differences_T = np.asarray(scores, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    tasks, mean = len(differences_T), float(differences_T.mean())
    spread = float(np.append(differences_T, 0.0).std(ddof=1))
    half = float(stdtrit(max(tasks - 1, 1), 0.975)) * spread / math.sqrt(tasks)
    return mean, mean - half, mean + half


def run_metrics(scores: Scores, seed: int = BOOTSTRAP_SEED) -> dict[str, float]:
    """mean@n, its stderr@n, and for n > 1 std@n, best@k and worst@k for k = 2, 4, ... n; each is the mean over tasks.

    n is the largest number of runs of a task; stderr is the standard error over tasks (at least two), so that mean +-
    1.96 stderr is an approximate 95 % interval; std is the population standard deviation of a task's runs. best@k
    (worst@k) is the expected maximum (minimum) of k runs drawn with replacement from a task's runs, by bootstrap.
    """
    import numpy as np

    if not scores:
        return {}
    n = max(len(runs) for runs in scores.values())
    tables = _tables(scores)
    total = len(scores)
    metrics = {f"mean@{n}": float(sum(table_TN.mean(axis=1).sum() for table_TN in tables) / total)}
    if total > 1:
        means_T = np.concatenate([table_TN.mean(axis=1) for table_TN in tables])
        metrics[f"stderr@{n}"] = float(means_T.std(ddof=1) / math.sqrt(total))
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(sum(table_TN.std(axis=1).sum() for table_TN in tables) / total)
    for k in _powers_of_two(n):
        best = worst = 0.0
        for table_TN in tables:
            draws_Bk = np.random.default_rng(seed).integers(table_TN.shape[1], size=(BOOTSTRAP_DRAWS, k))
            best += _expected(table_TN, draws_Bk.max(axis=1))
            worst += _expected(table_TN, draws_Bk.min(axis=1))
        metrics[f"best@{k}"] = best / total
        metrics[f"worst@{k}"] = worst / total
    return metrics


def named(taskset: str, metric: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``mean@4`` of ``metric`` on ``taskset`` becomes ``eval/<taskset>/<metric>/mean@4``."""
    return {f"eval/{taskset}/{metric}/{name}": value for name, value in metrics.items()}


def _tables(scores: Scores) -> "list[np.ndarray]":
    """The scores as one [T, N] table per number of runs N, with each row in ascending order."""
    import numpy as np

    by_count: dict[int, list[Sequence[float]]] = {}
    for runs in scores.values():
        by_count.setdefault(len(runs), []).append(runs)
    return [np.sort(np.asarray(rows, dtype=np.float64), axis=1) for _, rows in sorted(by_count.items())]


def _expected(table_TN: "np.ndarray", ranks_B: "np.ndarray") -> float:
    """Sum over tasks of the mean score at the drawn ranks; rank 0 is the lowest score of a row."""
    import numpy as np

    weights_N = np.bincount(ranks_B, minlength=table_TN.shape[1]) / len(ranks_B)
    return float((table_TN @ weights_N).sum())


def _powers_of_two(n: int) -> list[int]:
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n]
