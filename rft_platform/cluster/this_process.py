"""Functions that a process calls for itself: its signals, its imports, and its end with another process.

Only the standard library is imported, because servers call these functions before anything else is loaded.
"""

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

#: Packages that transformers imports if they are installed, for decoding methods and losses that are not used here.
#: They take a quarter of the import time of transformers.
NOT_FOR_TRANSFORMERS = ("sklearn", "scipy")
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


@contextmanager
def importing(without: Iterable[str] = ()) -> Iterator[None]:
    """Disable garbage collection while the block imports large packages, which takes a fifth of their import time.

    In the block, packages named in ``without`` count as not installed, unless they are already imported.
    """
    was_enabled = gc.isenabled()
    absent = [name for name in without if name not in sys.modules]
    gc.disable()
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if was_enabled:
            gc.enable()


def keep_imports() -> None:
    """Exclude all existing objects from garbage collection for the rest of the process (``gc.freeze``).

    Scanning the objects of large packages takes a quarter of a second in every full collection, and a second at the end
    of a process. Call it at the end of an ``importing`` block: otherwise the next collection scans them as new ones.
    Objects of user code that exist already are freed as usual, except those in reference cycles.
    """
    gc.freeze()


def is_multiprocessing_child() -> bool:
    """Whether ``multiprocessing`` started this process, as Dagster starts the workers of its runs."""
    import multiprocessing

    return multiprocessing.parent_process() is not None


def end_with(leader: int) -> None:
    """Kill this process and its group as soon as ``leader``, the first process of the group, has ended in any way.

    Does nothing in the leader itself, and in a process of another group.
    """
    if not leader or leader == os.getpid() or os.getpgrp() != leader:
        return
    ended = os.pidfd_open(leader)

    def watch() -> None:
        select.select([ended], [], [])
        os.killpg(leader, signal.SIGKILL)

    threading.Thread(target=watch, name="leader", daemon=True).start()
