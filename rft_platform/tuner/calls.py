"""Tasks, and calls of workflows and judges with the arguments that they name, outside the platform's runs."""

import inspect
import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.threads import call_in_thread
from rft_platform.common.user_code import accepted_arguments
from rft_platform.tuner.sections import DatasetConfig

_log = logging.getLogger("rft_platform.tuner")


def tasks_of(dataset: DatasetConfig, most: int | None) -> list[dict[str, Any]]:
    """The first ``most`` rows of a dataset, or all. Raises UserError if it is empty or cannot be read."""
    from rft_platform.tasks.sources import located_rows

    rows = located_rows(dataset.path, dataset.split_or_train, dataset.name)
    tasks = [row for _, _, row in islice(rows, most)]
    if not tasks:
        raise UserError(f"{dataset.path}: the dataset is empty; expected at least one row")
    return tasks


async def call_function(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return the result of ``function``; one that is not async runs in a thread.

    A function may also have the parameters ``auxiliary_models``, which is empty here, and ``logger``.
    """
    accepted = accepted_arguments(function, {**arguments, "auxiliary_models": {}, "logger": _log})
    if inspect.iscoroutinefunction(function):
        return await function(**accepted)
    returned = await call_in_thread(function, accepted)
    # Of an async function behind an ordinary decorator, or of an object with an async __call__.
    return await returned if inspect.isawaitable(returned) else returned
