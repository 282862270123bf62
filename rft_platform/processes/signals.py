"""Signals of a command in the foreground: every way of interrupting it ends it in order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal interrupt the block as Ctrl-C does, so that it is left in order."""
    # Under nohup a signal is ignored, and stays so.
    numbers = [n for n in _handled(signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not stop the tidying up."""
    previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in _handled(signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def _handled(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """The signals that can be handled here: only a process's main thread may say what they do."""
    return numbers if threading.current_thread() is threading.main_thread() else ()
