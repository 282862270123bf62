"""Judges for workers on several nodes."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.common.errors import JudgeUnavailableError, UserError
from rft_platform.judging.judged_run import JudgedRun
from rft_platform.judging.types import JudgeOutput


@dataclass
class Answer:
    """What a workflow returned."""

    text: str


def length(task: dict[str, Any], response: Answer | str, run: JudgedRun) -> JudgeOutput:
    """Depends on the class of the response, the conversation and the task; some answers raise an exception."""
    text = response.text if isinstance(response, Answer) else response
    if text == "raise":
        raise LookupError(f"no reward for {text}")
    asked = str(run.messages[0]["content"])
    task["changed"] = True
    metrics = {"asked": float(len(asked)), "third": len(text) / 3, "class": float(isinstance(response, Answer))}
    return JudgeOutput(0.1 * len(text) + len(task["question"]), metrics, {"other": 0.7})


async def share(task: dict[str, Any], responses: list[str], factor: float) -> list[float]:
    """The share of each response in the characters of its group."""
    lengths = [len(getattr(each, "text", each)) for each in responses]
    return [factor * each / sum(lengths) for each in lengths]


def odd_result(task: dict[str, Any], response: str) -> Any:
    """Not a reward for the answer ``list``, nor a number for the answer ``nan``."""
    return {"list": ["a list"], "nan": float("nan")}.get(response, True)


def sleeps(task: dict[str, Any], response: str) -> float:
    """Sleeps for as many seconds as the answer says."""
    time.sleep(float(response))
    return 1.0


def counted(task: dict[str, Any], response: str, folder: str, victim: str) -> float:
    """Leaves a file for each call that begins and ends; the first call of the answers ``kill`` kills a process."""
    begun = Path(folder) / f"{response}.{os.getpid()}.{time.monotonic_ns()}.begun"
    is_first = not list(begun.parent.glob(f"{response}.*.begun"))
    begun.touch()
    if response.startswith("kill") and (is_first or victim == "always"):
        time.sleep(0.2)
        os.kill(os.getppid() if victim == "actor" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    begun.with_suffix(".ended").touch()
    return float(len(response))


def refuses(task: dict[str, Any], response: str) -> float:
    """Cannot judge at all."""
    if response == "unavailable":
        raise JudgeUnavailableError("the model is away")
    raise UserError("the key is missing")


async def asks(task: dict[str, Any], response: str, auxiliary_models: dict[str, Any]) -> float:
    """The length of what an auxiliary model answers."""
    message = await auxiliary_models["helper"].chat([{"role": "user", "content": response}])
    return float(len(message["content"]))
