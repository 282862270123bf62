"""The agent of ``ray_scaling.py``: a model call, then a tool that waits as a browser or a remote sandbox does."""

import asyncio
import os
import random
import signal
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput


async def answer(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """One call and one tool. ``failing`` of the attempts fail, ``killed`` of all attempts by SIGKILL of the process."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    drawn = random.SystemRandom().random()
    await asyncio.sleep(task["tool_s"] * (0.5 if drawn < task["failing"] else 1.0))
    if drawn < task["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if drawn < task["failing"]:
        raise ConnectionError("the tool has ended")
    return WorkflowOutput(reward=0.5, response=message["content"])
