"""Run blocking work for callers that already have an event loop, such as notebooks."""

import asyncio
import signal
import threading
from asyncio.events import _set_running_loop  # in the module's ``__all__``: for programs that run loops themselves
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Call ``work`` and return its result. An event loop in which the caller runs is suspended until ``work`` returns.

    ``work`` runs in the calling thread, may run its own event loops, and is interrupted by Ctrl-C like any other
    code of the main thread. User code that must be stoppable at any point belongs in worker processes
    (``explorer.workers: {kind: process}``).
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with _suspended(loop), _ctrl_c_raises():
        return work()


@contextmanager
def _suspended(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let this thread run other event loops. ``loop`` cannot run in this time, because its caller blocks."""
    _set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(loop)  # ``asyncio.run`` has removed it
        _set_running_loop(loop)


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt here; ``asyncio.run`` would only cancel a task that cannot run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
