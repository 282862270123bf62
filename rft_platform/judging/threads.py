"""Call blocking functions without blocking the event loop, including those that need the main thread."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rft_platform import threads


async def call_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return the function's result from its own thread; a caller that stops waiting abandons that thread.

    The process does not wait for such a thread when it ends. A function that uses signals, which only the main thread
    can do, is called in the caller's thread if that is the main thread.
    """
    try:
        return await threads.call_in_thread(function, arguments)
    except ValueError as error:
        if threading.current_thread() is not threading.main_thread() or not any(map(_wants_signals, _chain(error))):
            raise
    return function(**arguments)


def _wants_signals(error: BaseException) -> bool:
    return "signal only works in main thread" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
