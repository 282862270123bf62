"""One attempt at a run: call the workflow with a recorded model and the arguments it declares, collect the result."""

import asyncio
import copy
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rft_platform.cluster.this_process import interruptible_loop
from rft_platform.common.errors import UserCodeError
from rft_platform.common.fault_classification import innermost_user_place
from rft_platform.common.threads import STOP_S, UserCodeLoop, await_user_code, call_in_thread, repeating
from rft_platform.common.user_code import accepted_arguments
from rft_platform.experience.record import UNFINISHED_METRIC
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runs.run import RunResult
from rft_platform.rollout.workflow import AgentWorkflow, LocalWorkflow, SingleTurnWorkflow, WorkflowOutput
from rft_platform.rollout.workflows.chat_models import framework_model, framework_models
from rft_platform.tasks.task import Task

if TYPE_CHECKING:
    from rft_platform.rollout.recording.clients import RecordingClients


LOGGER = logging.getLogger("rft_platform.rollout")  # workflow functions get it, too, as ``logger``

T = TypeVar("T")

#: Seconds between two looks at the event loop, and looks without a turn of it after which what blocks it is reported.
LOOK_S, LOOKS = 1.0, 5


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
        with interruptible_loop(), _blocking_noted(runner.get_loop()):
            return runner.run(main)
    finally:
        if remaining := asyncio.all_tasks(runner.get_loop()):
            asyncio.set_event_loop(None)
            threading.Thread(target=_hold, args=(runner, remaining), name="abandoned-loop", daemon=True).start()
        else:
            runner.close()


@contextmanager
def _blocking_noted(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Warn of user code that blocks ``loop``, which this thread runs: no other run continues, no time-out ends it."""
    owner, turned, looks = threading.get_ident(), threading.Event(), 0
    turned.set()

    def look() -> None:
        nonlocal looks
        if turned.is_set():
            turned.clear()
            looks = 0
            loop.call_soon_threadsafe(turned.set)
            return
        looks += 1  # counted, not timed: a process that was stopped meanwhile has not blocked
        place = _blocking_place(owner) if looks == LOOKS else None
        if place is not None:
            LOGGER.warning(
                "%s has blocked the event loop for %g s: meanwhile no other run continues, and explorer.max_timeout "
                "has no effect. Await what takes long, or write the workflow as a function without `async`, which runs "
                "in a thread, or set explorer.workers: {kind: process}",
                place,
                LOOKS * LOOK_S,
            )

    with repeating(look, LOOK_S, "event-loop-watch", "the event loop could not be watched"):
        yield


def _blocking_place(thread: int) -> str | None:
    """``file:line`` of the user code that ``thread`` runs in its event loop, or None."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    in_loop = max((number for number, frame in enumerate(stack) if frame.filename == __file__), default=0)
    return innermost_user_place(stack[in_loop:])


def _hold(*objects: object) -> None:
    """Keep ``objects`` alive until the process ends: Python does not free the frame of a daemon thread."""
    threading.Event().wait()


@dataclass(slots=True)
class AttemptStatistics:
    """Connection statistics of an attempt; also filled in if the attempt fails."""

    client_retries: int = 0  # HTTP requests that a client retried
    connection_lost: bool = False  # the engine could not be reached at least once
    machine_lost: bool = False  # the attempt ended because its worker was lost with its actor or its node


class RemoteFailure(UserCodeError):
    """An attempt failed in a worker process; the message begins with the kind of the original error."""

    def __init__(self, message: str, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location  # ``file:line`` of the user's code


async def make_attempt(
    workflow: LocalWorkflow,
    task: Task,
    clients: "RecordingClients",
    history: RunHistory,
    auxiliary_models: Mapping[str, Any] | None,
    truncated_reward: float | None,
    statistics: AttemptStatistics,
) -> RunResult:
    """Call ``workflow``; close ``history`` and the run's clients in every case.

    A run whose next prompt exceeds the context ends with the calls recorded so far and ``truncated_reward`` as its
    reward; if ``truncated_reward`` is None, the attempt fails. The run counts as such only if the engine refused its
    last call for this reason; the workflow's own error message does not matter. Raises what the workflow raises.
    """
    history.start()
    model = ModelHandle(clients, history, loop=asyncio.get_running_loop())
    try:
        returned = await await_user_code(call_workflow(workflow, task, model, auxiliary_models), "workflow")
        result = RunResult.of(returned, history.calls(), history.policies)
    except Exception:
        calls = history.calls()
        if truncated_reward is None or not history.context_exceeded or not calls:
            raise
        result = RunResult.cut_off(calls, truncated_reward)
    finally:
        unfinished = history.unfinished_calls
        history.close()
        await _close(model)
        statistics.client_retries, statistics.connection_lost = history.client_retries, history.connection_lost
    if unfinished:
        result.metrics[UNFINISHED_METRIC] = float(unfinished)
    return result


async def _close(model: ModelHandle) -> None:
    """Close the run's connections. A failure must not replace the outcome of the run, whose calls are recorded."""
    try:
        await model.aclose()
    except Exception as error:
        LOGGER.warning("the connections of a run could not be closed: %s: %s", type(error).__name__, error)
