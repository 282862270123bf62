"""A project that is complete on paper: the commands that only check and show need no real weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rft_platform.cli.main import app
from rft_platform.common.files import write_text
from rft_platform.config.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The folder that the commands of this test work on; nothing is in it yet."""
    root = tmp_path / "home"
    monkeypatch.setenv("RFT_HOME", str(root))
    monkeypatch.setenv("DAGSTER_HOME", str(root / "dagster"))  # commands set both: undone with the test
    return Home(root)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a valid configuration, with a model folder and data beside it; sections given replace those written."""

    def write(**sections: Any) -> Path:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        write_text(model / "config.json", '{"model_type": "qwen3"}')
        write_text(model / "tokenizer.json", "{}")
        write_text(model / "model.safetensors", "")
        write_tasks(tmp_path / "train.jsonl", 16)
        write_tasks(tmp_path / "test.jsonl", 4, first=100)
        config = {
            "project": "sums",
            "name": "one",
            "model": {"model_path": "model"},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
            "buffer": {
                "batch_size": 8,
                "total_steps": 2,
                "explorer_input": {
                    "taskset": {"path": "train.jsonl"},
                    "eval_tasksets": [{"path": "test.jsonl"}],
                },
            },
        }
        file = tmp_path / "rft.yaml"
        write_text(file, yaml.safe_dump({**config, **sections}))
        return file

    return write


@pytest.fixture
def rft() -> Callable[..., Result]:
    """Run a subcommand in this process."""
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def write_tasks(file: Path, count: int, first: int = 0) -> None:
    """A JSONL file of sums."""
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(first, first + count)]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
