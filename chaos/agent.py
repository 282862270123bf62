"""The agent of a scratch project on Ray: one question to the model, then a tool call that takes a moment."""

import asyncio
import fcntl
from pathlib import Path
from typing import Any

_TOOL_S = 0.3
_ONE_AT_A_TIME = Path(__file__).with_name("engine.lock")


async def add(task: dict[str, Any], model: Any) -> Any:
    """Ask for the sum. Float32 results depend on which requests an engine batches, so only one run asks at a time."""
    from rft_platform.rollout.workflow import WorkflowOutput

    with _ONE_AT_A_TIME.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = await model.chat([{"role": "user", "content": task["question"]}])
    await asyncio.sleep(_TOOL_S)
    return WorkflowOutput(response=message["content"])
