"""Signal handling of a foreground command: after every kind of interruption the command cleans up and ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

_interrupted: WeakSet[threading.Thread] = WeakSet()


def interrupt(thread: threading.Thread) -> None:
    """Tell a thread, which gets no signals, that its command was interrupted: ``is_interrupted`` is then true in it."""
    _interrupted.add(thread)


def is_interrupted() -> bool:
    """Whether ``interrupt`` was called for the current thread."""
    return threading.current_thread() in _interrupted


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP (a closed terminal) raise KeyboardInterrupt in the block, as Ctrl-C does.

    SIGINT does so, too, where a script's ``&`` has made the command ignore it. A SIGHUP that is ignored, as under
    nohup, stays ignored; only the first one counts, because shell and kernel both send one.
    """
    own = {
        signal.SIGINT: (signal.SIG_IGN, signal.default_int_handler),
        signal.SIGTERM: (signal.SIG_DFL, signal.default_int_handler),
        signal.SIGHUP: (signal.SIG_DFL, _hang_up),
    }
    before = {n: own[n][0] for n in _handled(*own) if signal.getsignal(n) == own[n][0]}
    for number in before:
        signal.signal(number, own[number][1])
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def interruptible_loop() -> Iterator[None]:
    """Let SIGINT and SIGTERM cancel the main task of an ``asyncio.Runner`` in the block: it raises KeyboardInterrupt.

    A handler that raises another BaseException, as Dagster's does, may be called within a callback of the event loop,
    which would only log the exception: the signal would be lost. SIGTERM arrives as SIGINT, so where SIGTERM is handled
    SIGINT is not ignored.
    """
    handlers = {number: signal.getsignal(number) for number in _handled(signal.SIGINT, signal.SIGTERM)}
    is_used = any(map(callable, handlers.values()))
    replaced = {n: handler for n, handler in handlers.items() if callable(handler) or (is_used and n == signal.SIGINT)}
    for number in replaced:
        own = signal.default_int_handler if number == signal.SIGINT else _raise_interrupt
        signal.signal(number, own)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during the block, so that a second Ctrl-C does not stop the clean-up."""
    previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in _handled(signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def _handled(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """``numbers`` in the main thread, else none: only the main thread may set signal handlers."""
    return numbers if threading.current_thread() is threading.main_thread() else ()
