"""Write everything that the recipe needs into one folder: model, tokenizer, tasks, demonstrations and configuration."""

import json
from importlib import resources
from pathlib import Path

from rft_platform.common.files import write_text
from rft_platform.recipes.arithmetic.model import CORPUS, build_model
from rft_platform.recipes.math_agent.demonstrations import write_demonstrations
from rft_platform.recipes.math_agent.problems import sentences, write_tasks


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``tasks/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``. Idempotent."""
    files = resources.files("rft_platform.recipes.math_agent")
    call = json.dumps({"name": "calculator", "arguments": {"expression": ""}})
    template = files.joinpath("chat_template.jinja").read_text(encoding="utf-8")
    build_model(folder / "model", corpus=(*CORPUS, call, *sentences(), "Tools: Answer: "), template=template)
    if not (folder / "tasks" / "demonstrations.jsonl").exists():
        write_tasks(folder / "tasks")
        write_demonstrations(folder / "tasks" / "demonstrations.jsonl")
    config = folder / "rft.yaml"
    recipe = files.joinpath("rft.yaml").read_text(encoding="utf-8")
    if not config.exists() or config.read_text(encoding="utf-8") != recipe:
        write_text(config, recipe)
    return config
