"""Weights and notes are compared with those of the undisturbed run, without what may differ between equal projects."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from chaos.invariants.context import Context
from chaos.invariants.reference import notes_equal_the_undisturbed_run
from chaos.invariants.store import weights_equal_the_undisturbed_run
from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, Trained, publish, write

CONFIG = """
model: {model_path: unused}
buffer: {batch_size: 2, total_steps: 2, explorer_input: {taskset: {path: tasks.jsonl}}}
"""


def project_with(folder: Path, files: dict[str, dict[str, float]]) -> Project:
    home = Home(folder)
    home.config_file.parent.mkdir(parents=True, exist_ok=True)
    home.config_file.write_text(CONFIG)
    for name, tensors in files.items():
        save_file({tensor: np.full(2, value, "float32") for tensor, value in tensors.items()}, folder / name)
    project = Project.open(home)
    publish(project.store, Policy(str(folder), 1, str(files), round=1))
    return project


def test_weights_in_several_files_are_compared(tmp_path: Path) -> None:
    ours = {"model-00001-of-00002.safetensors": {"a": 1.0}, "model-00002-of-00002.safetensors": {"b": 2.0}}
    theirs = {"model.safetensors": {"a": 1.0, "b": 2.5}}
    context = Context(project_with(tmp_path / "ours", ours), 1, project_with(tmp_path / "theirs", theirs))
    (found,) = weights_equal_the_undisturbed_run(context)
    assert "weights differ from the undisturbed run by 0.5" in found.message
    assert context.facts["largest_weight_difference"] == pytest.approx(0.5)


def project_that_trained(folder: Path, **lineage: Any) -> Project:
    project = project_with(folder, {})
    trained = Trained(str(folder), 1, "digest", steps=1, metrics={}, seconds={}, cpu_seconds=1.0, lineage=lineage)
    write(project.store, 1, trained)
    return project


def test_notes_of_another_number_of_rounds_or_commit_are_equal_and_those_of_another_judge_are_not(
    tmp_path: Path,
) -> None:
    ours = project_that_trained(tmp_path / "ours", config_digest="2 rounds", code_version="a", judge_version="x")
    same = project_that_trained(tmp_path / "same", config_digest="4 rounds", code_version="b", judge_version="x")
    other = project_that_trained(tmp_path / "other", config_digest="2 rounds", code_version="a", judge_version="y")
    assert [found.message for found in notes_equal_the_undisturbed_run(Context(ours, 1, same))] == []
    (found,) = notes_equal_the_undisturbed_run(Context(ours, 1, other))
    assert "note train-policy differs from the undisturbed run in /lineage/judge_version" in found.message
