"""Workflows for workers on several nodes."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from tests.support.builders import wait_until


async def where(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Three calls. The response names the process and the actor that started it."""
    for turn in range(3):
        await model.chat([{"role": "user", "content": f"{task['question']}, turn {turn}"}])
    return WorkflowOutput(reward=0.5, response={"worker": os.getpid(), "actor": os.getppid()})


async def waits(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Writes a file named after its process, waits for the file ``continue``, and does what ``where`` does."""
    folder = Path(task["folder"])
    (folder / f"{os.getpid()}.waiting").touch()
    await asyncio.to_thread(wait_until, (folder / "continue").exists, "the test continues", 60)
    return await where(task, model)


async def which_python(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """One call; the response names the interpreter."""
    await model.chat([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(reward=1.0, response={"python": sys.executable})


async def dies_once(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Kills its process, or the actor that started it, at the first attempt of a task that says so."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    marker = Path(task["folder"]) / task["question"].replace(" ", "-")
    if (victim := task.get("fault")) and not marker.exists():
        marker.touch()
        os.kill(os.getpid() if victim == "worker" else os.getppid(), signal.SIGKILL)
        await asyncio.sleep(60)
    return WorkflowOutput(response=message["content"])


async def adds(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Asks for the sum; the judge compares the digits of the answer."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=message["content"])
