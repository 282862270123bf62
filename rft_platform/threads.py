"""Threads of their own for code that blocks: one that hangs keeps nobody waiting, not even the end of the process."""

import asyncio
import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class DaemonThreads(ThreadPoolExecutor):
    """A daemon thread for every piece of work. No work waits for another's, and the interpreter's end for none.

    A thread cannot be stopped: in a pool of some size, those that hang would leave no room for the others.
    """

    def __init__(self, name: str) -> None:
        """``name`` is that of the threads. The base class, which event loops ask for, starts none of its own."""
        super().__init__(max_workers=1)
        self._name = name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Begin ``fn(*args, **kwargs)`` at once."""
        future: Future[Any] = Future()
        work = partial(fn, *args, **kwargs)
        threading.Thread(target=_work, args=(work, future), daemon=True, name=self._name).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for nothing."""


_THREADS = DaemonThreads("rft-call")


async def call_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The function's result, from a thread of its own; a caller that stops waiting leaves that thread behind.

    What it raises is raised here; SystemExit and what else is no Exception as RuntimeError.
    """
    context = contextvars.copy_context()
    work = partial(context.run, function, **arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _carried, work)


def _carried(work: Callable[[], Any]) -> Any:
    owner = os.getpid()
    try:
        result = work()
    except BaseException as error:
        end_forked_child(owner, error)
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future cannot carry these
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise
    end_forked_child(owner)
    return result


def _work(work: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def end_forked_child(owner: int, error: BaseException | None = None) -> None:
    """End this process at once if user code, called in process ``owner``, has forked it and then come back.

    It would go on as if it were ``owner``, whose loop, connections and files it shares. ``error``: what it raised.
    """
    if os.getpid() == owner:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)
