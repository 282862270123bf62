"""Call workflow functions with the arguments they declare, and cancel them; used in this process and in workers."""

import asyncio
import copy
import ctypes
import inspect
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from rft_platform.rollout.auxiliary import handed_out
from rft_platform.rollout.chat_models import framework_model
from rft_platform.rollout.model_handle import ModelHandle
from rft_platform.rollout.workflow import AgentWorkflow, LocalWorkflow, SingleTurnWorkflow, WorkflowOutput
from rft_platform.signature import accepted_arguments
from rft_platform.tasks.task import Task
from rft_platform.threads import call_in_thread, end_forked_child

LOGGER = logging.getLogger("rft_platform.rollout")

#: Seconds in which a cancelled workflow must end (its ``finally`` blocks); after that it is abandoned.
STOP_S = 2.0


async def call_workflow(
    workflow: LocalWorkflow, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None
) -> Any:
    """Return what ``workflow`` returns for a copy of ``task``; a function that is not async runs in a thread."""
    task = replace(task, raw=copy.deepcopy(task.raw))  # a run may change its task; other runs must not see it
    if isinstance(workflow, AgentWorkflow):
        return await workflow.run(task, model, handed_out(auxiliary_models))
    if isinstance(workflow, SingleTurnWorkflow):
        answer = await model.chat(workflow.messages(task))
        return WorkflowOutput(response=answer.get("content"))
    offered = {
        "task": task.raw,
        "model": framework_model(model),
        "auxiliary_models": handed_out(auxiliary_models),
        "logger": LOGGER,
    }
    function: Callable[..., Any] = workflow
    arguments = accepted_arguments(function, offered)
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    returned = await call_in_thread(function, arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await user code; when this is cancelled, give the code ``STOP_S`` seconds to end, then abandon it.

    Raises what the code raises, SystemExit included, and RuntimeError if the code cancels itself: neither may end the
    event loop, which other runs share.
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


async def end_other_tasks() -> None:
    """Cancel all other tasks of this event loop; abandon those that are still running after ``STOP_S`` seconds.

    The loop would otherwise wait for them forever when it closes.
    """
    own = {asyncio.current_task()}
    if left := asyncio.all_tasks() - own:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=STOP_S)
    for task in asyncio.all_tasks() - own:
        task.cancel()  # some were started in the meantime
        _leave_behind(task)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    owner, returned, raised = os.getpid(), None, None
    try:
        returned = await coroutine
    except (Exception, SystemExit) as error:  # a task that raises SystemExit would end the event loop
        raised = error
    end_forked_child(owner, raised)
    return returned, raised


def _leave_behind(task: "asyncio.Task[Any]") -> None:
    """Abandon a task that refuses to end, so that the event loop does not wait for it when it closes.

    Its coroutine is never freed: freeing it would raise GeneratorExit in it, and code that suppresses that too would
    then run endlessly in the thread that collects it.
    """
    LOGGER.warning("a workflow that was stopped goes on: it hides its cancellation (an 'except' that is too wide)")
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # the warning above reports it
    asyncio._unregister_task(task)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
