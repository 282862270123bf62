"""Selectors that use every task once per epoch; a batch at the end of an epoch continues with the next epoch."""

from collections.abc import Callable, Sequence

import numpy as np

from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.selectors.selector_registry import Chosen, Moment, selector
from rft_platform.tasks.task import Task


@selector("sequential")
def sequential(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Select tasks in the order of the dataset."""
    return in_epochs(len(tasks), moment, lambda epoch: range(len(tasks)))


@selector("shuffle")
def shuffle(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Select tasks in a new random order in each epoch."""

    def permuted(epoch: int) -> Sequence[int]:
        order: list[int] = np.random.default_rng([moment.seed, epoch]).permutation(len(tasks)).tolist()
        return order

    return in_epochs(len(tasks), moment, permuted)


def in_epochs(count: int, moment: Moment, order_of: Callable[[int], Sequence[int]]) -> Chosen:
    """The batch of ``moment`` in a stream of epochs; ``order_of(epoch)`` is a permutation of ``count`` indices."""
    positions = range(moment.first, moment.first + moment.count)
    orders = {epoch: order_of(epoch) for epoch in sorted({position // count for position in positions})}
    return Chosen([orders[position // count][position % count] for position in positions])
