"""Metrics of an optimiser step that come from its rows and from the machine, and their summary over a training."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rft_platform.training.data.rollout_rows import TrainingRows

#: Lower bounds of the staleness histogram's bins, in optimiser steps.
STALENESS_BINS = (0, 1, 4, 8, 16, 32)
_STATUS = Path("/proc/self/status")
_PHASES = (
    "load",
    "data",
    "reference",
    "teacher",
    "old_logprobs",
    "entropy_change",
    "values",
    "compile",
    "forward_backward",
    "optimizer",
    "critic",
    "save",
)
_TOTALS = ("cpu_seconds", "flops")
_PEAKS = ("peak_rss_mb", "peak_gpu_mb", "staleness_max")


class Stopwatch:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PHASES, 0.0)

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the duration of the body to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def add(self, other: "Stopwatch") -> None:
        """Add the seconds of another stopwatch."""
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds


class DeviceClock:
    """Seconds of work by name. Events in the CUDA stream time CUDA work, so timing adds no synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str, *, on_host: bool = False) -> Iterator[None]:
        """Add the duration of the body to ``name``; with ``on_host``, the time of this thread on any device."""
        start, event = time.perf_counter(), None if on_host else self._event()
        yield
        if event is not None and (end := self._event()) is not None:
            self._events.append((name, event, end))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Return the seconds measured since the last call."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = {}, []
        if events:
            torch.cuda.synchronize()
        for name, start, end in events:
            seconds[name] = seconds.get(name, 0.0) + start.elapsed_time(end) / 1000
        return seconds

    def _event(self) -> "torch.cuda.Event | None":
        if not self._on_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def row_metrics(rows: TrainingRows, chosen: np.ndarray, policy_version: int) -> dict[str, float]:
    """Staleness, truncation and reward of the ``chosen`` rows, which train the policy of ``policy_version``.

    The share of groups with equal rewards is computed over the whole training, because steps may exclude such groups.
    Staleness of a row is the number of optimiser steps between the policy that sampled it and the policy that is
    trained; its histogram gives shares of rows.
    """
    chosen, flat = rows.known(chosen), rows.zero_variance_groups
    of_all = {} if flat is None else {"zero_variance_groups": flat}
    if not len(chosen):
        return of_all
    age = policy_version - rows.facts["policy_version"][chosen]
    bins = np.digitize(age, STALENESS_BINS[1:])
    shares = np.bincount(bins, minlength=len(STALENESS_BINS)) / len(chosen)
    return {
        "reward_mean": float(rows.facts["reward"][chosen].mean()),
        "truncation_rate": float(rows.facts["truncated"][chosen].mean()),
        **of_all,
        "staleness_mean": float(age.mean()),
        "staleness_max": float(age.max()),
        **{f"staleness_from_{low}": float(share) for low, share in zip(STALENESS_BINS, shares, strict=True)},
    }


def memory_mb(device: torch.device) -> dict[str, float]:
    """Peak memory in MiB: resident on the host so far, and allocated on a GPU since the last call."""
    found = {"peak_rss_mb": peak_rss_mb()}
    if device.type == "cuda":
        found["peak_gpu_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    return found


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, in MiB.

    Reads procfs if there is one, because ``getrusage`` starts at the peak of the parent process.
    """
    if _STATUS.exists():
        peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def summarise(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Summarise each metric over all steps: sum totals (processor time, operations), maximise peaks, average others."""
    names = {name: None for step in steps for name in step}
    summary = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        over = sum(values) if name in _TOTALS else max(values) if name in _PEAKS else sum(values) / len(values)
        summary[name] = float(over)
    return summary
