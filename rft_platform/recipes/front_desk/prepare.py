"""Write everything that the online demo needs into one folder: model, demonstrations, questions and configuration."""

from importlib import resources
from pathlib import Path

from rft_platform.common.files import write_text
from rft_platform.recipes.arithmetic.model import build_model
from rft_platform.recipes.front_desk.questions import corpus, write_questions


def prepare(folder: Path) -> Path:
    """Write ``model/``, ``questions/`` and ``rft.yaml`` below ``folder``; return the path of ``rft.yaml``."""
    build_model(folder / "model", corpus=corpus())
    if not (folder / "questions" / "test.jsonl").exists():
        write_questions(folder / "questions")
    recipe = resources.files("rft_platform.recipes.front_desk").joinpath("rft.yaml").read_text(encoding="utf-8")
    config = folder / "rft.yaml"
    if not config.exists():
        write_text(config, recipe)
    return config
