"""A workflow that keeps what it saw of the event loop from run to run."""

import asyncio
import os
from typing import Any

from rft_platform.rollout.workflow import WorkflowOutput

LOOPS: list[asyncio.AbstractEventLoop] = []
LEFT: list[asyncio.Task[None]] = []


async def keep_the_loop(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Says how many loops this process has seen, and whether what the attempt before left running is still alive."""
    await model.chat([{"role": "user", "content": "hello"}])
    loop = asyncio.get_running_loop()
    if loop not in LOOPS:
        LOOPS.append(loop)
    alive = sum(not left.done() for left in LEFT)
    LEFT.append(asyncio.create_task(asyncio.sleep(1000)))
    return WorkflowOutput(reward=0.0, metrics={"loops": float(len(LOOPS)), "alive": float(alive)})


async def leave_a_stubborn_task(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Leaves a task that ignores its cancellation; says which process it ran in."""

    async def ignore_cancellation() -> None:
        while True:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    await model.chat([{"role": "user", "content": "hello"}])
    LEFT.append(asyncio.create_task(ignore_cancellation()))
    return WorkflowOutput(reward=0.0, metrics={"pid": float(os.getpid())})
