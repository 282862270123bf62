"""Whatever one run raises, also what is no Exception, fails that run alone: in this process and in worker processes."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rft_platform.common.threads import UserCodeLoop
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, WorkflowOutput
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine
from .samples import ask_once, roll_out


class Halt(BaseException):
    """As the cancellation of another event loop's library."""


class Unreadable:
    """A returned object whose attribute ends the caller."""

    response, metrics = None, None

    @property
    def reward(self) -> float:
        raise Halt("no reward")


async def leave() -> None:
    """End the process, as a script does."""
    raise SystemExit(4)


async def interrupt() -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt("of the agent")


async def raise_group() -> None:
    """Raise several errors at once."""
    raise BaseExceptionGroup("two tools", [Halt("first"), ValueError("second")])


async def cancel_itself() -> None:
    """Cancel the task in which it runs, and wait."""
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(30)


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fault() -> None:
        raise error

    return fault


def gathered(fault: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def several() -> None:
        await asyncio.gather(asyncio.sleep(0.01), fault())

    return several


FAULTS: dict[str, Callable[[], Awaitable[None]]] = {
    "GeneratorExit: ": raising(GeneratorExit()),
    "Halt: stop": raising(Halt("stop")),
    "Failed: outcome of a test": raising(pytest.fail.Exception("outcome of a test")),
    "KeyboardInterrupt: of the agent": interrupt,
    "SystemExit: 4": leave,
    "SystemExit: 5": gathered(raising(SystemExit(5))),
    "Halt: gathered": gathered(raising(Halt("gathered"))),
    "BaseExceptionGroup: two tools (2 sub-exceptions): Halt: first; ValueError: second": raise_group,
    "RuntimeError: the workflow cancelled itself; the platform did not cancel it": raising(asyncio.CancelledError()),
}


async def agent(task: dict[str, Any], model: ModelHandle) -> Any:
    """One call, then the fault that the task names."""
    output = await ask_once(task, model)
    if task["fault"] == "unreadable":
        return Unreadable()
    if task["fault"] == "cancel":
        await cancel_itself()
    if task["fault"] is not None:
        await FAULTS[task["fault"]]()
    return output


def faulty_tasks(faults: list[str | None]) -> list[Task]:
    return [Task(f"task-{n}", "set", "", None, {"question": f"question {n}", "fault": f}) for n, f in enumerate(faults)]


def check_only_faulty_runs_failed(batch: RolloutBatch) -> None:
    assert {row.task_id for row in batch.rows} == {"task-0", f"task-{len(FAULTS) + 3}"}
    errors = dict(batch.report.errors)
    assert errors.pop("Halt: no reward") == 1
    cancelled = "RuntimeError: the workflow cancelled itself; the platform did not cancel it"
    assert errors.pop(cancelled) == 2
    assert errors == dict.fromkeys(FAULTS.keys() - {cancelled}, 1)


def test_whatever_an_agent_raises_fails_its_own_run_alone(engine: FakeEngine) -> None:
    given = faulty_tasks([None, *FAULTS, "unreadable", "cancel", None])
    batch = roll_out(engine, given, agent, repeat_times=1, max_retries=0, group_policy="drop")
    check_only_faulty_runs_failed(batch)


@pytest.mark.slow
def test_whatever_an_agent_raises_fails_its_own_run_alone_in_workers(engine: FakeEngine) -> None:
    given = faulty_tasks([None, *FAULTS, "unreadable", "cancel", None])
    workflow = WorkerWorkflow(f"{__name__}:agent", count=2)
    batch = roll_out(engine, given, workflow, repeat_times=1, max_retries=0, group_policy="drop")
    check_only_faulty_runs_failed(batch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_the_platform_ends_the_batch(engine: FakeEngine, number: signal.Signals) -> None:
    """Also if the agents catch every exception."""

    async def stubborn(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if task["question"] == "question 0":
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        try:
            await asyncio.sleep(30)
        except BaseException:
            raise ValueError("caught") from None
        return WorkflowOutput()

    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            roll_out(engine, faulty_tasks([None, None]), stubborn, repeat_times=1)  # one signal
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_callback_that_exits_does_not_end_the_loop() -> None:
    async def main() -> str:
        asyncio.get_running_loop().call_soon(_exit)
        await asyncio.sleep(0.01)
        return "done"

    with asyncio.Runner(loop_factory=UserCodeLoop) as runner:
        assert runner.run(main()) == "done"


def test_a_main_task_that_exits_ends_the_loop() -> None:
    with asyncio.Runner(loop_factory=UserCodeLoop) as runner, pytest.raises(SystemExit):
        runner.run(leave())


def _exit() -> None:
    raise SystemExit(1)
