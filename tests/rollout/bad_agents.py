"""Workflows that do everything to their process that they should not."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput


async def answer(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """One call, then what the task says goes wrong."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    fault = task.get("fault")
    if fault is not None:
        FAULTS[fault](task)
        await asyncio.to_thread(str)  # the loop still hears of its threads
    return WorkflowOutput(response={"question": task["question"], "answer": message["content"]})


def _leave_children(task: dict[str, Any]) -> None:
    """A child of the same group, and one with its own session; then hang, with the interpreter held."""
    for session in (False, True):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
        with Path(task["pids"]).open("a") as pids:
            pids.write(f"{child.pid}\n")
    _hang_in_c(task)


def _hang_in_c(task: dict[str, Any]) -> None:
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock: not even a signal handler runs


def _raise(task: dict[str, Any]) -> None:
    raise LookupError("no such tool")


def _hide_cancellation(task: dict[str, Any]) -> None:
    raise asyncio.CancelledError


def _fork_and_speak(task: dict[str, Any]) -> None:
    """A forked child that goes on as if it were the worker, and raises in it."""
    if os.fork() == 0:
        raise RuntimeError("in the forked child")
    os.wait()


def _stop_once(task: dict[str, Any]) -> None:
    """Stop the process, but not in a second attempt."""
    marker = Path(task["pids"])
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)


def _shout(task: dict[str, Any]) -> None:
    os.write(1, b'{"result": "not a message"}\n')
    print("x" * 200_000)


FAULTS = {
    "raise": _raise,
    "exit": lambda task: sys.exit(3),
    "os-exit": lambda task: os._exit(7),
    "abort": lambda task: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda task: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda task: time.sleep(600),
    "hang in C": _hang_in_c,
    "stop once": _stop_once,
    "leave children": _leave_children,
    "cancel": _hide_cancellation,
    "fork": _fork_and_speak,
    "shout": _shout,
}


def unstoppable(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """Blocks without end, where the task says so."""
    if task.get("fault"):
        time.sleep(600)
    client = model.get_openai_client()
    messages: Any = [{"role": "user", "content": task["question"]}]
    text = client.chat.completions.create(model=model.model_name, messages=messages).choices[0].message.content
    return WorkflowOutput(response=text)
