"""An agent of two turns that fails in the ways its task says, in the share of runs that its test asks for."""

import asyncio
import time
from pathlib import Path
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput


async def agent(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Says its marker in every message; the first attempts of some of its runs raise or hang."""
    marker = task["marker"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{marker} first"}]
    messages.append(await model.chat(messages))
    fault = _claim(task)
    if fault == "raise":
        raise RuntimeError("the tool broke")
    if fault == "hang":
        await asyncio.Event().wait()
    if fault == "block":
        time.sleep(600)  # noqa: ASYNC251 (a worker can be killed while it does)
    messages.append({"role": "user", "content": f"{marker} second"})
    answer = await model.chat(messages)
    return WorkflowOutput(reward=1.0, response=[marker, answer.get("content")])


def _claim(task: dict[str, Any]) -> str | None:
    """The next fault that is left for the task's runs: each is claimed once, by whichever process comes first."""
    for number, fault in enumerate(task["faults"]):
        try:
            (Path(task["folder"]) / f"{task['marker']}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return str(fault)
    return None
