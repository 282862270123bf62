"""Write everything that a recipe of a tiny agent with tools needs: model, tokenizer, tasks and configuration."""

import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from rft_platform.common.files import write_text
from rft_platform.recipes.arithmetic.model import CORPUS, build_model

DEMONSTRATIONS = "demonstrations.jsonl"


def prepare_tool_agent(folder: Path, package: str, corpus: Iterable[str], write_tasks: Callable[[Path], None]) -> Path:
    """Write ``model/``, ``tasks/`` and the package's ``rft.yaml`` below ``folder``; return its path. Idempotent.

    The tokenizer learns its vocabulary from ``corpus``. ``write_tasks`` writes files into ``tasks/``, last of all the
    demonstrations. The chat template of the model names the tools with their parameters only, so that a small context
    is enough.
    """
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    build_model(folder / "model", corpus=(*CORPUS, *corpus), template=template)
    if not (folder / "tasks" / DEMONSTRATIONS).exists():
        write_tasks(folder / "tasks")
    config = folder / "rft.yaml"
    recipe = resources.files(package).joinpath("rft.yaml").read_text(encoding="utf-8")
    if not config.exists() or config.read_text(encoding="utf-8") != recipe:
        write_text(config, recipe)
    return config


def tool_calls(*calls: tuple[str, dict[str, Any], str]) -> list[dict[str, Any]]:
    """The messages of tool calls in a demonstration: name, arguments and result of each."""
    messages: list[dict[str, Any]] = []
    for name, arguments, result in calls:
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call", "content": result},
        ]
    return messages
