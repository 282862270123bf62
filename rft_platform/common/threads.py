"""Run user code in separate daemon threads and asyncio tasks, and a step of the platform at intervals in a thread.

Blocking code that hangs delays neither other work nor the end of the process. Whatever the code raises, it ends neither
its event loop nor other code that runs there.
"""

import asyncio
import contextvars
import logging
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")

#: Seconds in which cancelled user code must end, including its ``finally`` blocks.
STOP_S = 2.0
_LONGEST_PAUSE_S = 60.0  # of ``repeating``, after failures


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


@contextmanager
def repeating(step: Callable[[], object], every_s: float, name: str, problem: str) -> Iterator[None]:
    """Call ``step`` every ``every_s`` seconds during the block, in a thread called ``name``.

    A failure is logged after the words ``problem``, and the step is tried again after longer pauses.
    """
    stop = threading.Event()

    def repeat() -> None:
        wait = every_s
        while not stop.wait(wait):
            try:
                step()
                wait = every_s
            except Exception as error:
                wait = min(2 * wait, _LONGEST_PAUSE_S)
                LOG.warning("%s and will be retried: %s", problem, error)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_S)


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


class UserCodeLoop(asyncio.SelectorEventLoop):
    """An event loop that a SystemExit ends only in its main task. In another task, the code that awaits it gets it."""

    _main: asyncio.Future[Any] | None = None

    def run_until_complete(self, future: Generator[Any, None, Result] | Awaitable[Result]) -> Result:
        """Run until ``future``, the main task, is done."""
        self._main = main = asyncio.ensure_future(cast("Awaitable[Result]", future), loop=self)
        return super().run_until_complete(main)

    def run_forever(self) -> None:
        """Run until the loop is stopped."""
        while True:
            try:
                return super().run_forever()
            except SystemExit:  # asyncio lets it through, after it has become the result of its task
                if self._main is None or self._main.done():
                    raise


async def await_user_code(coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
    """Await user code in its own asyncio task. If the caller is cancelled, that task has ``STOP_S`` seconds to end.

    Raises what the code raises, which need not be an Exception, and RuntimeError if the code cancels itself. ``what``
    names the code in that error. The cause of the caller's cancellation is that of the code: its traceback shows where
    the code waited.
    """
    task = asyncio.get_running_loop().create_task(_outcome(coroutine))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError as cancellation:
        task.cancel()
        await asyncio.wait([task], timeout=STOP_S)
        if task.cancelled():
            try:
                task.result()
            except asyncio.CancelledError as inner:
                raise cancellation from inner
        raise
    if task.cancelled():
        raise RuntimeError(f"the {what} cancelled itself; the platform did not cancel it")
    returned, error = task.result()
    if error is not None:
        raise error
    return returned


def is_cancellation(error: BaseException) -> bool:
    """Whether ``error`` is the cancellation of the current task, and not a failure of the code that it runs."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    owner, returned, raised = os.getpid(), None, None
    try:
        returned = await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # Ctrl-C is no KeyboardInterrupt here: it cancels the main task of the loop
        raised = error
    end_forked_child(owner, raised)
    return returned, raised


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
