"""Configurations that pass every check, for tests to spoil."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_platform.config.load import build_config
from rft_platform.config.schema.rft_config import RftConfig


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RftConfig]:
    """Builds a valid configuration with ``section__key=value`` put in; a model folder and a data file are there."""
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    data.write_text('{"question": "1+1", "answer": "2"}\n')

    def make(**settings: Any) -> RftConfig:
        raw: dict[str, Any] = {
            "model": {"model_path": str(model)},
            "buffer": {"batch_size": 4, "total_steps": 3, "explorer_input": {"taskset": {"path": str(data)}}},
        }
        for key, value in settings.items():
            *parents, last = key.split("__")
            section = raw
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        return build_config(raw)

    return make
