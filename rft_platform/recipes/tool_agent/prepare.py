"""Write everything that a recipe of a tiny agent with tools needs: model, tokenizer, tasks and configuration."""

import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from rft_platform.config.reference import write_with_schema
from rft_platform.recipes.arithmetic.model import VOCABULARY, build_model

DEMONSTRATIONS = "demonstrations.jsonl"


def prepare_tool_agent(
    folder: Path,
    package: str,
    corpus: Iterable[str],
    write_tasks: Callable[[Path], None],
    *,
    vocabulary: int = VOCABULARY,
) -> Path:
    """Write ``model/``, ``tasks/`` and the package's configurations to ``folder``; return ``rft.yaml``. Idempotent.

    The tokenizer learns its ``vocabulary`` tokens from ``corpus``. ``write_tasks`` writes files into ``tasks/``, last
    of all the demonstrations. The chat template of the model names the tools with their parameters only, so that a
    small context is enough.
    """
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    build_model(folder / "model", corpus=tuple(corpus), template=template, vocabulary=vocabulary)
    if not (folder / "tasks" / DEMONSTRATIONS).exists():
        write_tasks(folder / "tasks")
    for written in resources.files(package).iterdir():
        if written.name.endswith(".yaml"):
            write_with_schema(folder / written.name, written.read_text(encoding="utf-8"))
    return folder / "rft.yaml"


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
