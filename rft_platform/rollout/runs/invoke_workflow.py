"""Call workflow functions with the arguments that they declare, in an event loop of runs; also used in workers."""

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rft_platform.cluster.this_process import interruptible_loop
from rft_platform.common.call_signature import accepted_arguments
from rft_platform.common.threads import STOP_S, UserCodeLoop, call_in_thread
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import AgentWorkflow, LocalWorkflow, SingleTurnWorkflow, WorkflowOutput
from rft_platform.rollout.workflows.chat_models import framework_model, framework_models
from rft_platform.tasks.task import Task

LOGGER = logging.getLogger("rft_platform.rollout")

T = TypeVar("T")


async def call_workflow(
    workflow: LocalWorkflow, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None
) -> Any:
    """Call ``workflow`` with a copy of ``task``; return its result. A function that is not async runs in a thread."""
    task = replace(task, raw=copy.deepcopy(task.raw))  # a run may change its task; other runs must not see it
    if isinstance(workflow, AgentWorkflow):
        return await workflow.run(task, model, framework_models(auxiliary_models))
    if isinstance(workflow, SingleTurnWorkflow):
        answer = await model.chat(workflow.messages(task))
        return WorkflowOutput(response=answer.get("content"))
    offered = {
        "task": task.raw,
        "model": framework_model(model),
        "auxiliary_models": framework_models(auxiliary_models),
        "logger": LOGGER,
    }
    function: Callable[..., Any] = workflow
    arguments = accepted_arguments(function, offered)
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    returned = await call_in_thread(function, arguments)
    return await returned if inspect.isawaitable(returned) else returned


async def end_other_tasks() -> bool:
    """Cancel all other tasks of this event loop; return whether they ended within ``STOP_S`` seconds."""
    loop, own, cancelled = asyncio.get_running_loop(), asyncio.current_task(), set[asyncio.Task[Any]]()
    deadline = loop.time() + STOP_S
    while (running := asyncio.all_tasks() - {own}) and loop.time() < deadline:
        for task in running - cancelled:  # once each: a second cancellation would interrupt a ``finally`` block
            task.cancel()
        cancelled |= running
        await asyncio.wait(running, timeout=deadline - loop.time())
    if running:
        LOGGER.warning(
            "%d tasks of workflows ignore their cancellation (an 'except' that is too wide) and cannot be stopped in "
            "this process; with explorer.workers: {kind: process} a run that does not end is killed",
            len(running),
        )
    return not running


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, but do not wait for tasks that ignored ``end_other_tasks``.

    ``main`` must call ``end_other_tasks`` at its end. If tasks remain, the event loop is stopped but not closed, and is
    kept until the process ends: freeing a task could hang, because its code may suppress every exception, also the one
    with which Python ends a coroutine.
    """
    runner = asyncio.Runner(loop_factory=UserCodeLoop)
    try:
        with interruptible_loop():
            return runner.run(main)
    finally:
        if remaining := asyncio.all_tasks(runner.get_loop()):
            asyncio.set_event_loop(None)
            threading.Thread(target=_hold, args=(runner, remaining), name="abandoned-loop", daemon=True).start()
        else:
            runner.close()


def _hold(*objects: object) -> None:
    """Keep ``objects`` alive until the process ends: Python does not free the frame of a daemon thread."""
    threading.Event().wait()
