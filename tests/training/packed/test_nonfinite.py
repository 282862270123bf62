"""Halving a step until those that are not finite stand alone."""

import numpy as np
import torch
from torch import Tensor

from rft_platform.common.errors import some
from rft_platform.training.loop.optimizer_step import culprits, not_finite


def units(count: int) -> list[np.ndarray]:
    return [np.array([i]) for i in range(count)]


def test_two_culprits_among_many_rows() -> None:
    probed: list[int] = []

    def is_finite(rows: np.ndarray) -> bool:
        probed.append(len(rows))
        return not np.isin(rows, [17, 300]).any()

    assert [found.tolist() for found in culprits(units(512), is_finite)] == [[17], [300]]
    assert len(probed) < 40
    assert sum(probed) < 5 * 512


def test_pairs_are_blamed_together() -> None:
    pairs = [np.array([2 * i, 2 * i + 1]) for i in range(8)]
    assert [found.tolist() for found in culprits(pairs, lambda rows: 5 not in rows)] == [[4, 5]]


def test_no_more_than_five_are_looked_for() -> None:
    assert [found.item() for found in culprits(units(1000), lambda rows: False)] == [0, 1, 2, 3, 4]


def test_an_overflow_of_the_sum_alone_has_no_culprit() -> None:
    assert culprits(units(64), lambda rows: len(rows) < 64) == []


def test_tensors_are_named_if_any_rank_found_them() -> None:
    def reduce(values: Tensor, op: str) -> Tensor:
        return torch.maximum(values, torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=values.dtype))

    tensors = [("a", torch.ones(2)), ("b", torch.tensor([1.0, torch.inf])), ("c", None), ("d", torch.zeros(2))]
    assert not_finite(tensors, reduce) == ["b", "d"]
    assert some([]) == "none"
    assert some(list("abcdefg")) == "a, b, c, d, e, ..."
