"""Draw every batch independently."""

from collections.abc import Sequence

import numpy as np

from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.selectors.selector_registry import Chosen, Moment, selector
from rft_platform.tasks.task import Task


@selector("random")
def random(tasks: Sequence[Task], moment: Moment, history: History) -> Chosen:
    """Draw tasks without replacement within a batch, as long as there are enough tasks."""
    generator = np.random.default_rng([moment.seed, moment.step])
    whole, rest = divmod(moment.count, len(tasks))
    rounds = [generator.permutation(len(tasks)) for _ in range(whole)]
    drawn = np.concatenate([*rounds, generator.choice(len(tasks), rest, replace=False)])
    return Chosen(drawn.astype(int).tolist())
