"""Calling functions that block without blocking the event loop, and without waiting for those that hang."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any


async def call_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The function's result, from a thread of its own; a caller that stops waiting leaves that thread behind.

    The process does not wait for such a thread when it ends. A function that works by signals, which the main thread
    alone can have, is called in the caller's thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(put: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            put(value)

    def work() -> None:
        put: Callable[[Any], None] = done.set_result
        try:
            value = context.run(function, **arguments)
        except BaseException as error:
            put, value = done.set_exception, error
            if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future cannot carry these
                value = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(settle, put, value)

    threading.Thread(target=work, daemon=True, name="rft-judge").start()
    try:
        return await done
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
