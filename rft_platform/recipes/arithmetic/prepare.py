"""Write everything that the demo needs into one folder: model, tokenizer, tasks and configuration."""

from importlib import resources
from pathlib import Path

from rft_platform.config.reference import write_with_schema
from rft_platform.recipes.arithmetic.model import build_model
from rft_platform.recipes.arithmetic.tasks import write_tasks


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``tasks/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``. Idempotent."""
    build_model(folder / "model")
    if not (folder / "tasks" / "test.jsonl").exists():
        write_tasks(folder / "tasks")
    config = folder / "rft.yaml"
    recipe = resources.files("rft_platform.recipes.arithmetic").joinpath("rft.yaml").read_text(encoding="utf-8")
    write_with_schema(config, recipe)
    return config
