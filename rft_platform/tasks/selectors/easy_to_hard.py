"""A curriculum: each epoch goes from the easiest tasks to the hardest."""

from collections.abc import Sequence

import numpy as np

from rft_platform.common.errors import UserError
from rft_platform.tasks.selectors.pass_history import History
from rft_platform.tasks.selectors.selector_registry import Chosen, Moment, selector
from rft_platform.tasks.selectors.sequential import in_epochs
from rft_platform.tasks.task import Task


@selector("easy_to_hard")
def easy_to_hard(
    tasks: Sequence[Task], moment: Moment, history: History, *, descending: bool = False, pass_reward: float = 1.0
) -> Chosen:
    """Sort by the columns ``feature_keys``; the smallest value (with ``descending`` the largest) is the easiest.

    Without columns, sort by the pass rate measured before the epoch began (a run passes if its reward reaches
    ``pass_reward``); a task without runs has the pass rate 1/2. Ties keep the order of the dataset.
    """
    if moment.feature_keys:
        by_column = _by_columns(tasks, moment.feature_keys, descending)
        return in_epochs(len(tasks), moment, lambda epoch: by_column)
    if descending:
        raise UserError("task selector 'easy_to_hard': descending needs feature_keys, and none is set")

    def measured(epoch: int) -> Sequence[int]:
        begin = moment.step_of(epoch * len(tasks))
        passes, failures = history.outcomes(begin, pass_reward).totals(len(tasks))
        order: list[int] = np.argsort(-(passes + 1) / (passes + failures + 2), kind="stable").tolist()
        return order

    return in_epochs(len(tasks), moment, measured)


def _by_columns(tasks: Sequence[Task], keys: Sequence[str], descending: bool) -> list[int]:
    missing = [key for key in keys if any(task.raw.get(key) is None for task in tasks)]
    if missing:
        columns = ", ".join(tasks[0].raw)
        raise UserError(
            f"task_selector.feature_keys: not every task has a value of {', '.join(missing)}; the columns are {columns}"
        )
    try:
        return sorted(range(len(tasks)), key=lambda index: [tasks[index].raw[key] for key in keys], reverse=descending)
    except TypeError as error:
        raise UserError(f"task_selector.feature_keys {list(keys)}: values cannot be put in order ({error})") from None
