"""The agents of ``ray_scaling.py``: a model call, then a tool that waits like a browser or computes like a sandbox."""

import asyncio
import os
import random
import signal
import time
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput


async def answer(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """One call and one tool. ``failing`` of the attempts fail, ``killed`` of all attempts by SIGKILL of the process."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    drawn = random.SystemRandom().random()
    seconds = task["tool_s"] * (0.5 if drawn < task["failing"] else 1.0)
    if task["computes"]:
        end = time.process_time() + seconds
        while time.process_time() < end:
            sorted(range(10_000), key=lambda number: -number)
    else:
        await asyncio.sleep(seconds)
    if drawn < task["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if drawn < task["failing"]:
        raise ConnectionError("the tool has ended")
    return WorkflowOutput(reward=0.5, response=message["content"])
