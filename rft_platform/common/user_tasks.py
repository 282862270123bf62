"""Await user code so that it can end neither its event loop nor other code that runs there, whatever it raises."""

import asyncio
import os
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

from rft_platform.common.threads import end_forked_child

Result = TypeVar("Result")

#: Seconds in which cancelled user code must end, including its ``finally`` blocks.
STOP_S = 2.0


class UserCodeLoop(asyncio.SelectorEventLoop):
    """An event loop that a SystemExit ends only in its main task. In another task, the code that awaits it gets it."""

    _main: asyncio.Future[Any] | None = None

    def run_until_complete(self, future: Generator[Any, None, Result] | Awaitable[Result]) -> Result:
        """Run until ``future``, the main task, is done."""
        self._main = main = asyncio.ensure_future(future, loop=self)
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
    names the code in that error.
    """
    task = asyncio.get_running_loop().create_task(_outcome(coroutine))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=STOP_S)
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
