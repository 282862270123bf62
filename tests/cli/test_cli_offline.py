"""``rft run`` of an offline training: what is refused before anything starts, and what the plan says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.rounds.project.record import write
from tests.support.records import trained

ROWS = {
    "good.jsonl": [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10)] * 2,
    "columns.jsonl": [{"instruction": "x", "output": "y"}],
    "silent.jsonl": [{"messages": [{"role": "user", "content": "x"}]}],
    "pairs.jsonl": [{"prompt": "x", "chosen": "y", "rejectd": "z"}],
    "empty.jsonl": [],
}


@pytest.fixture
def offline(write_config: Callable[..., Path]) -> Callable[..., Path]:
    """Write the configuration of an offline training."""

    def write(
        data: str | None = "good.jsonl",
        algorithm: str = "sft",
        *,
        template: bool = True,
        tokenizer: str | None = None,
        **sections: Any,
    ) -> Path:
        experience_buffer = {} if data is None else {"path": data}
        buffer = {"train_batch_size": 5, "trainer_input": {"experience_buffer": experience_buffer}}
        settings = {"mode": "train", "algorithm": {"algorithm_type": algorithm}, "buffer": buffer, **sections}
        config = write_config(**settings)
        for name, rows in ROWS.items():
            write_text(config.parent / name, "".join(json.dumps(row) + "\n" for row in rows))
        if template:
            write_text(config.parent / "model" / "chat_template.jinja", "{{ messages }}")
        if tokenizer is not None:
            write_text(config.parent / "model" / "tokenizer_config.json", tokenizer)
        return config

    return write


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": None}, "experience_buffer.path is not set: sft needs demonstrations"),
        ({"data": ""}, "experience_buffer.path is not set: sft needs demonstrations"),
        ({"data": "gone.jsonl"}, "gone.jsonl: no such file or folder"),
        ({"data": "columns.jsonl"}, "its columns are 'instruction', 'output'; expected 'messages', or 'prompt' with"),
        ({"data": "silent.jsonl"}, "silent.jsonl:1, messages: no assistant message to learn from"),
        ({"data": "empty.jsonl"}, "the dataset is empty"),
        ({"data": "pairs.jsonl", "algorithm": "dpo"}, "did you mean 'rejectd' for 'rejected'?"),
        ({"algorithm": "gkd"}, "algorithm.teacher_model_path is not set: gkd learns from a teacher"),
        ({"template": False}, "has no chat template"),
        ({"template": False, "tokenizer": "{"}, "tokenizer_config.json: not readable JSON"),
        ({"template": False, "tokenizer": "[]"}, "has no chat template"),
        ({"mode": "both"}, "trains on demonstrations and mode both explores: set mode: train"),
        ({"warm_start": {"path": "train.jsonl"}}, "warm_start: sft in mode train starts from model.model_path"),
    ],
)
def test_bad_input_is_refused_with_nothing_written(
    home: Home, offline: Callable[..., Path], rft: Callable[..., Result], settings: dict[str, Any], said: str
) -> None:
    config = offline(**settings)
    result = rft("run", "--config", config)
    assert result.exit_code == 2, result.output
    assert any(said in line and line.startswith("error: ") for line in result.stderr.splitlines()), result.stderr
    assert not home.root.exists()


def test_rounds_make_no_sense(home: Home, offline: Callable[..., Path], rft: Callable[..., Result]) -> None:
    result = rft("run", "--config", offline(), "--rounds", "2")
    assert result.exit_code == 2
    assert "--rounds: mode train uses existing data" in result.stderr


def test_the_plan_counts_rows_and_steps(home: Home, offline: Callable[..., Path], rft: Callable[..., Result]) -> None:
    result = rft("run", "--config", offline(trainer={"save_interval": 3}), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "10 rows, 2 optimiser steps" in result.output
    assert "left out 10 duplicate (first: good.jsonl:11, good.jsonl:12, good.jsonl:13) of 20 rows" in result.output
    assert "a checkpoint every 3 steps" in result.output
    assert "engine" not in result.output, "there are no held-out tasks to evaluate on"


def test_a_finished_training_is_not_made_longer(
    home: Home, offline: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    from rft_platform.config.load import load_config
    from rft_platform.rounds.offline import make_dataset
    from rft_platform.rounds.project.project import Project

    config = offline()
    project = Project(home, load_config(config))
    make_dataset(project, 1)
    write(project.store, 1, trained(steps=7))
    result = rft("run", "--config", config, "--dry-run")
    assert result.exit_code == 2
    assert "has trained 7 steps and its settings now require 2" in result.stderr


def test_rows_that_were_too_long_take_no_steps(
    home: Home, offline: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    from rft_platform.config.load import load_config
    from rft_platform.rounds.offline import make_dataset
    from rft_platform.rounds.project.project import Project

    config = offline()
    project = Project(home, load_config(config))
    make_dataset(project, 1)
    write(project.store, 1, trained(steps=1, metrics={"rows_too_long": 7.0}))
    result = rft("run", "--config", config, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "7 rows longer than max_model_len are dropped" in result.output
