"""User code that does harm once: each harm is a file in a folder, and is done by whoever removes it first."""

import os
import signal
from pathlib import Path

from rft_platform.cluster.local.leases import read_lease
from rft_platform.rollout.workflow import WorkflowOutput

FUSES, HOME = Path(os.environ.get("RFT_TEST_FUSES", "/nowhere")), Path(os.environ.get("RFT_HOME", "/nowhere"))


def burns(name: str) -> bool:
    """Whether this harm is to be done now, by this caller."""
    try:
        (FUSES / name).unlink()
    except FileNotFoundError:
        return False
    return True


async def answer(task: dict, model) -> WorkflowOutput:
    """One question, one answer; the engine may be killed on the way."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    if burns("engine"):
        os.kill(read_lease(HOME / "leases" / "engine.json").pid, signal.SIGKILL)
    return WorkflowOutput(response=message.get("content") or "")


def digit_share(task: dict, response: str) -> float:
    """The share of digits; the MLflow server may be killed on the way, and the judge may have a bug."""
    if burns("mlflow"):
        os.kill(int((FUSES / "mlflow.pid").read_text()), signal.SIGKILL)
    if (FUSES / "bug").exists():
        raise ValueError("no digits today")
    return sum(character.isdigit() for character in response) / max(len(response), 1)
