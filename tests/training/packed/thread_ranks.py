"""Ranks as threads of this process, which really wait for each other."""

import threading
from typing import Literal

import torch
from torch import Tensor

from rft_platform.training.distributed import Reduce


class ThreadRanks:
    """A real all-reduce between threads: every rank waits for the others, then reads the same result."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: dict[int, Tensor] = {}

    def reduce_of(self, rank: int) -> Reduce:
        def reduce(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
            self._given[rank] = values
            self._barrier.wait()
            stacked = torch.stack([self._given[r] for r in range(self.size)])
            self._barrier.wait()
            return stacked.sum(0) if op == "sum" else stacked.amax(0)

        return reduce
