"""Run blocking work for callers that already have an event loop, such as notebooks."""

import asyncio
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_AGAIN_S = 0.2


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns; raise what it raises. If the calling thread runs an event loop, use another thread.

    Ctrl-C interrupts the work in either case, and the caller waits until it has ended cleanly.
    """
    if not _in_event_loop():
        return work()
    returned: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="tune", daemon=True)
    with _ctrl_c_raises():
        interrupted = _is_interrupted(thread.start)
        while thread.is_alive():
            if interrupted:
                _interrupt(thread)
            interrupted = _is_interrupted(lambda: thread.join(_LOOK_AGAIN_S))
    if raised:
        raise raised[0]
    return returned[0]


def _is_interrupted(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except KeyboardInterrupt:
        return True
    return False


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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


def _interrupt(thread: Thread) -> None:
    """Raise KeyboardInterrupt in ``thread`` as soon as it executes Python code again."""
    identity, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)
