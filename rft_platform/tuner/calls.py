"""Calls of workflows and judges outside the platform's runs, with the arguments that their parameters name."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from rft_platform.common.threads import call_in_thread
from rft_platform.common.user_code import accepted_arguments

_log = logging.getLogger("rft_platform.tuner")


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
