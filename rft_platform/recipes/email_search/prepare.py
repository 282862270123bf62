"""Write everything that the recipe needs into one folder: model, tokenizer, tasks, demonstrations and configuration."""

import json
from pathlib import Path

from rft_platform.recipes.email_search.corrections import write_corrections
from rft_platform.recipes.email_search.demonstrations import write_demonstrations
from rft_platform.recipes.email_search.questions import sentences, write_tasks
from rft_platform.recipes.tool_agent.prepare import DEMONSTRATIONS, prepare_tool_agent


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``tasks/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``. Idempotent."""
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in _CALLS]

    def write(tasks: Path) -> None:
        write_tasks(tasks)
        write_corrections(tasks / "corrections.jsonl")
        write_demonstrations(tasks / DEMONSTRATIONS)

    corpus = (*calls, *sentences(), "Tools: search(topic, month) read(id)")
    return prepare_tool_agent(folder, "rft_platform.recipes.email_search", corpus, write, vocabulary=VOCABULARY)


VOCABULARY = 544  # every word of the mailbox is one token
_CALLS = (("search", {"topic": "", "month": ""}), ("read", {"id": ""}), ("open", {"id": ""}))
