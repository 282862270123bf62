"""Choosing the tasks of an explore batch: a pure function of the step, so that a resumed run goes on where it was."""

from collections.abc import Sequence
from typing import Literal

from rft_platform.tasks.task import Task

Order = Literal["sequential", "shuffle", "random"]


def select(tasks: Sequence[Task], batch_size: int, step: int, order: Order, seed: int) -> list[Task]:
    """The ``batch_size`` tasks of explore batch ``step`` (from 0).

    ``sequential`` and ``shuffle`` use every task once an epoch; ``shuffle`` has a new permutation each epoch. A batch
    that crosses the end of an epoch goes on with the next one, so that it can hold a task twice. ``random`` draws
    each batch anew, without replacement inside the batch as far as there are tasks.
    """
    if not tasks or batch_size < 1 or step < 0:
        raise ValueError(f"select: {len(tasks)} tasks, batch_size {batch_size}, step {step}: nothing can be selected")
    if order == "random":
        return [tasks[index] for index in _draw(len(tasks), batch_size, step, seed)]
    positions = range(step * batch_size, (step + 1) * batch_size)
    epochs = {position // len(tasks) for position in positions}
    orders = {epoch: _permutation(len(tasks), epoch, seed) if order == "shuffle" else None for epoch in epochs}
    chosen = []
    for position in positions:
        epoch, index = divmod(position, len(tasks))
        permutation = orders[epoch]
        chosen.append(tasks[index if permutation is None else permutation[index]])
    return chosen


def _permutation(count: int, epoch: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def _draw(count: int, batch_size: int, step: int, seed: int) -> list[int]:
    import numpy as np

    generator = np.random.default_rng([seed, step])
    whole, rest = divmod(batch_size, count)
    rounds = [generator.permutation(count) for _ in range(whole)]
    return np.concatenate([*rounds, generator.choice(count, rest, replace=False)]).astype(int).tolist()
