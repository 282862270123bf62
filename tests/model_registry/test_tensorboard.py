"""TensorBoard's own reader finds what was written, once."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rft_platform.model_registry.tensorboard import TensorBoardRun


@dataclass
class Step:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_steps_and_rounds_are_read_back(tmp_path: Path) -> None:
    run = TensorBoardRun(tmp_path, "project one/run")
    run.log_steps("r0001-train", [Step(1, {"loss": 0.5, "mfu": 0.25}), Step(2, {"loss": 0.25})])
    run.log_steps("r0002-train", [Step(3, {"loss": 0.125})])
    run.log_round("r0001-eval", 1, {"pass": {"greedy": 0.75}, "engine": "vllm", "ok": True}, prefix="eval/")
    assert run.folder == tmp_path / "project_one_run"
    assert read(run.folder) == {
        "train/loss": [(1, 0.5), (2, 0.25), (3, 0.125)],
        "train/mfu": [(1, 0.25)],
        "eval/pass/greedy": [(1, 0.75)],
    }


def test_a_round_that_is_written_again_replaces_its_curve(tmp_path: Path) -> None:
    run = TensorBoardRun(tmp_path, "run")
    first = run.log_steps("r0001-train", [Step(1, {"loss": 1.0}), Step(2, {"loss": 2.0})])
    second = run.log_steps("r0001-train", [Step(1, {"loss": 4.0})])
    assert first == second
    assert read(run.folder) == {"train/loss": [(1, 4.0)]}


def test_a_killed_writer_leaves_the_last_complete_file(tmp_path: Path) -> None:
    run = TensorBoardRun(tmp_path, "run")
    run.log_steps("r0001-train", [Step(1, {"loss": 1.0})])

    def broken():
        yield Step(1, {"loss": 3.0})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.log_steps("r0001-train", broken())
    assert read(run.folder) == {"train/loss": [(1, 1.0)]}


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    run = TensorBoardRun(tmp_path, "run")
    run.log_steps("r0001-train", [Step(1, {"loss": float("inf")})])
    assert read(run.folder) == {"train/loss": [(1, float("inf"))]}
