"""Split rows into optimiser steps. The steps depend only on data and seed, not on the number of ranks."""

import math
from collections.abc import Iterator

import numpy as np


def group_steps(group: np.ndarray, batch_size: int, seed: int, epochs: int) -> Iterator[np.ndarray]:
    """Yield the row indices of each step of ``epochs`` passes; rows of one group stay together.

    Groups are shuffled and then distributed in that order. The ``ceil(R / batch_size)`` steps of a pass get as equal
    numbers of rows as whole groups allow. No step is left with only a few rows, whose gradient would count as much as
    that of a full step.
    """
    rows = len(group)
    for epoch in range(epochs if rows else 0):
        shuffled = _shuffled(group, seed, epoch)
        sizes = np.diff(np.append(_starts(group[shuffled]), rows))
        middle = np.cumsum(sizes) - sizes / 2
        step_of_group = (middle * math.ceil(rows / batch_size) / rows).astype(np.int64)
        step_of_row = np.repeat(step_of_group, sizes)
        yield from np.split(shuffled, _starts(step_of_row)[1:])


def stream_steps(group: np.ndarray, batch_size: int, seed: int, position: int, count: int) -> Iterator[np.ndarray]:
    """Yield the row indices of steps that take ``count`` groups, ``batch_size`` per step, from a shuffled stream.

    The stream is endless; each pass is a new permutation. ``position`` is the number of groups already taken, so that a
    resumed stream continues where it stopped.
    """
    order = np.argsort(group, kind="stable")
    starts = np.append(_starts(group[order]), len(group))
    groups = len(starts) - 1
    epoch, permutation = -1, np.empty(0, np.int64)
    for first in range(position, position + count, batch_size):
        taken: list[np.ndarray] = []
        for place in range(first, min(first + batch_size, position + count)):
            if place // groups != epoch:
                epoch = place // groups
                permutation = np.random.default_rng([seed, epoch]).permutation(groups)
            chosen = permutation[place % groups]
            taken.append(order[starts[chosen] : starts[chosen + 1]])
        yield np.concatenate(taken)


def share_of_rank(rows: np.ndarray, group: np.ndarray, cost: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """This rank's part of a step's ``rows``: whole groups, balanced by ``cost`` (largest first, to the least loaded).

    ``group`` covers all rows; ``cost`` [len(rows)] covers those of the step, in any additive unit.
    """
    if world_size == 1:
        return rows
    groups, member = np.unique(group[rows], return_inverse=True)
    weight = np.bincount(member, cost)
    load = np.zeros(world_size)
    owner = np.empty(len(groups), np.int64)
    for index in np.argsort(-weight, kind="stable"):
        owner[index] = load.argmin()
        load[owner[index]] += weight[index]
    return rows[owner[member] == rank]


def _shuffled(group: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Row indices with the groups in random order; the order within a group is kept."""
    place = np.random.default_rng([seed, epoch]).permutation(int(group.max()) + 1)
    return np.argsort(place[group], kind="stable")


def _starts(values: np.ndarray) -> np.ndarray:
    """Indices at which a new value starts, including the first."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))
