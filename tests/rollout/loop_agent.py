"""A workflow that keeps what it saw of the event loop from run to run."""

import asyncio
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
