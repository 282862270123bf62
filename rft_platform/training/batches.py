"""Which rows make which optimiser step: the same for the same data and seed, on any number of ranks."""

import math
from collections.abc import Iterator

import numpy as np


def group_steps(group: np.ndarray, batch_size: int, seed: int, epochs: int) -> Iterator[np.ndarray]:
    """Row indices of each step of ``epochs`` passes; rows of one group stay together.

    Groups are shuffled, then dealt out in that order so that the ``ceil(R / batch_size)`` steps of a pass are as equal
    in rows as whole groups allow: no step is left with a few rows, whose gradient would count as much as a full one's.
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
    """Row indices of the steps that take ``count`` groups, ``batch_size`` a step, from an endless shuffled stream.

    Each pass of the stream is a new permutation. ``position`` counts the groups already taken, so that a resumed stream
    goes on where it stopped.
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
    """This rank's part of a step's ``rows``: whole groups, balanced by ``cost`` (dearest first to the least loaded).

    ``group`` is of all rows, ``cost`` [len(rows)] of those of the step, in any unit that adds up.
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
    """Rows with their groups in random order; within a group as they were."""
    place = np.random.default_rng([seed, epoch]).permutation(int(group.max()) + 1)
    return np.argsort(place[group], kind="stable")


def _starts(values: np.ndarray) -> np.ndarray:
    """Where a new value begins, the first one included."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))
