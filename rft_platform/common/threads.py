"""Run blocking code in separate daemon threads, so that hanging code delays neither other work nor the process end."""

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
    """An executor with one daemon thread per call. No call waits for another, and the interpreter waits for no call.

    A thread cannot be stopped, so hanging calls would occupy all threads of a pool of fixed size.
    """

    def __init__(self, name: str) -> None:
        """``name``: name of the threads. Event loops require ``ThreadPoolExecutor``; its own threads are not used."""
        super().__init__(max_workers=1)
        self._name = name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start ``fn(*args, **kwargs)`` at once."""
        future: Future[Any] = Future()
        work = partial(fn, *args, **kwargs)
        threading.Thread(target=_work, args=(work, future), daemon=True, name=self._name).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing; in particular, do not wait."""


_THREADS = DaemonThreads("rft-call")


async def call_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run ``function`` in a separate thread and return its result; if the caller is cancelled, the thread runs on.

    Exceptions of the function are raised here. StopIteration, and errors such as SystemExit that do not derive from
    Exception, are raised as RuntimeError.
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
    """End this process at once if it is a fork of process ``owner`` that user code made and returned from.

    Otherwise the child would continue as if it were ``owner``, whose event loop, connections and files it shares.
    ``error``: the exception that the user code raised.
    """
    if os.getpid() == owner:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)
