"""Calling user code with what it asks for, and keeping hold of it: the same here and in a worker process."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rft_platform.rollout.auxiliary import handed_out
from rft_platform.rollout.chat_models import framework_model
from rft_platform.rollout.model_handle import ModelHandle
from rft_platform.rollout.workflow import AgentWorkflow, LocalWorkflow, SingleTurnWorkflow, WorkflowOutput
from rft_platform.signature import accepted_arguments
from rft_platform.tasks.task import Task

LOGGER = logging.getLogger("rft_platform.rollout")

#: What a cancelled workflow gets to end in (its ``finally`` blocks); one that goes on after it is left behind.
STOP_S = 2.0


class Threads(ThreadPoolExecutor):
    """Where agents that block run. As many as runs, not as processors: they wait for the model.

    The event loop ends without waiting for them: a thread cannot be stopped, so one whose run timed out may still be
    busy, and would hold up the batch for as long as it likes.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and wait for none."""
        super().shutdown(wait=False, cancel_futures=True)


async def call_workflow(
    workflow: LocalWorkflow, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None
) -> Any:
    """What ``workflow`` returns for ``task``; one that is not async runs in a thread."""
    if isinstance(workflow, AgentWorkflow):
        return await workflow.run(task, model, handed_out(auxiliary_models))
    if isinstance(workflow, SingleTurnWorkflow):
        answer = await model.chat(workflow.messages(task))
        return WorkflowOutput(response=answer.get("content"))
    offered = {
        "task": copy.deepcopy(task.raw),  # a run may change its task without another one seeing it
        "model": framework_model(model),
        "auxiliary_models": handed_out(auxiliary_models),
        "logger": LOGGER,
    }
    function: Callable[..., Any] = workflow
    arguments = accepted_arguments(function, offered)
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    returned = await asyncio.to_thread(function, **arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of user code; when this is cancelled the code has ``STOP_S`` to end, and then is left behind.

    Whatever the code raises is raised here, SystemExit too, and a cancellation of its own as RuntimeError: neither may
    end the event loop, on which other runs live.
    """
    task = asyncio.get_running_loop().create_task(_outcome(coroutine))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=STOP_S)
        if not task.done():
            _leave_behind(task)
        raise
    if task.cancelled():
        raise RuntimeError("the workflow was cancelled by itself, not by the platform")
    returned, error = task.result()
    if error is not None:
        raise error
    return returned


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except (Exception, SystemExit) as error:  # a task that raises SystemExit would end the event loop
        return None, error


def _leave_behind(task: "asyncio.Task[Any]") -> None:
    """Keep the event loop from waiting, at its end, for a task that refuses to end."""
    LOGGER.warning("a workflow that was stopped goes on: it hides its cancellation (an 'except' that is too wide)")
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # said above
    asyncio._unregister_task(task)
