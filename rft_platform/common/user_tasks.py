"""Await user code so that it can end neither its event loop nor other code that runs there, whatever it raises."""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from rft_platform.common.threads import end_forked_child

#: Seconds in which cancelled user code must end, including its ``finally`` blocks.
STOP_S = 2.0


class UserCodeLoop(asyncio.SelectorEventLoop):
    """An event loop that a SystemExit in a task does not end. The code that awaits the task gets it."""

    def run_forever(self) -> None:
        """Run until the loop is stopped."""
        while True:
            try:
                return super().run_forever()
            except SystemExit:  # asyncio lets it through, after it has become the result of the task
                continue


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
