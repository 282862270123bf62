"""Write everything that the recipe needs into one folder: model, tokenizer, tasks, demonstrations and configuration."""

import json
from pathlib import Path

from rft_platform.recipes.arithmetic.model import CORPUS
from rft_platform.recipes.math_agent.demonstrations import write_demonstrations
from rft_platform.recipes.math_agent.problems import sentences, write_tasks
from rft_platform.recipes.tool_agent.prepare import DEMONSTRATIONS, prepare_tool_agent


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``tasks/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``. Idempotent."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": ""}})

    def write(tasks: Path) -> None:
        write_tasks(tasks)
        write_demonstrations(tasks / DEMONSTRATIONS)

    corpus = (*CORPUS, call, *sentences(), "Tools: Answer: ")
    return prepare_tool_agent(folder, "rft_platform.recipes.math_agent", corpus, write)
