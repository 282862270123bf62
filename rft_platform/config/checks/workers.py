"""Checks and notices for the execution of workflows: worker processes, over-rollout, dynamic time-outs."""

import shutil
from collections.abc import Iterator

from rft_platform.config.schema.rft_config import RftConfig


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
