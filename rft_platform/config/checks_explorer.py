"""Checks and notices for the execution of workflows: worker processes, over-rollout, dynamic time-outs."""

import shutil
from collections.abc import Iterator

from rft_platform.config.schema import RftConfig

_BATCHED = "single_turn"


def explorer_problems(config: RftConfig) -> Iterator[str]:
    """One line for each invalid setting of the worker processes."""
    workers = config.explorer.workers
    if workers.kind == "inprocess":
        for key, value in (("python", workers.python), ("count", workers.count)):
            if value is not None:
                yield (
                    f"explorer.workers.{key} is {value}, but workflows run in this process: set explorer.workers.kind "
                    "to process, or leave it out"
                )
    elif workers.python is not None and shutil.which(workers.python) is None:
        yield (
            f"explorer.workers.python {workers.python}: no such program; give the interpreter of the environment that "
            "the agent needs, as in /envs/agents/bin/python"
        )


def explorer_notices(config: RftConfig) -> Iterator[str]:
    """One line for each setting that has no effect because the taskset's workflow makes a single call."""
    taskset, explorer = config.buffer.explorer_input.taskset, config.explorer
    if taskset is None or taskset.workflow != _BATCHED:
        return
    asked = {
        "explorer.over_rollout": explorer.over_rollout.ratio > 0,
        "explorer.dynamic_timeout": explorer.dynamic_timeout.enable,
        "explorer.workers": explorer.workers.kind == "process",
    }
    for key, is_asked in asked.items():
        if is_asked:
            yield f"{key} has no effect on workflow single_turn: its runs are one batch of the engine"
