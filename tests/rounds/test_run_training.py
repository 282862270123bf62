"""What the driver tells of a training: where it goes on, and rows that were left out for their length."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common import progress
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, read
from rft_platform.rounds.train import Training, run_training
from rft_platform.training.protocol import OnRepeat, StepEvent, TrainRequest, TrainResult


class Resumed:
    """Answers as a trainer that repeats two trainings and goes on after step 2 of the third."""

    def train(self, request: TrainRequest, on_step: Callable[[StepEvent], None], on_repeat: OnRepeat) -> TrainResult:
        on_repeat(10, 2)
        for step in (11, 12, 13, 14):
            on_step(StepEvent(step, {"loss": 1.0}, reported_before=step <= 12))
        return TrainResult("folder", 14, "digest", 4, {"rows_too_long": 3.0}, {}, 0.0)


def test_repeated_trainings_and_the_step_at_which_a_training_continues_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    project, parent = Project(Home(tmp_path), build_config({})), Policy("parent", 10, "digest", round=2)
    request = TrainRequest("parent", 10, "out", AlgorithmSpec(), OptimizerSpec())
    with caplog.at_level(logging.INFO):
        _, trained = run_training(project, Resumed(), Training(request, parent, 3, 4, (), list))  # type: ignore[arg-type]
    assert [record.announcement for record in caplog.records if hasattr(record, "announcement")] == [
        "r0003 training: repeats 10 steps of 2 earlier trainings, whose trainer state was not saved",
        "r0003 training: continues after step 2 of 4",
    ]
    assert [record.progress.done for record in caplog.records if hasattr(record, "progress")] == [0, 3, 4]
    assert "r0003: 3 rows longer than max_model_len are left out" in caplog.text
    steps = trained.step_events
    assert [step.step for step in steps] == [11, 12, 13, 14] and not any(step.reported_before for step in steps)
    stored = read(project.store, 3).trained()
    assert stored is not None and stored.step_events == steps


def test_a_training_without_steps_publishes_the_parent_with_its_model_version(tmp_path: Path) -> None:
    class Idle:
        """Answers as a trainer that finds no row with a gradient."""

        def train(self, request: TrainRequest, *_: object) -> TrainResult:
            return TrainResult(folder, 8, "digest", 0, {}, {}, 0.0)

    folder = str(tmp_path / "checkpoints" / "parent")
    canary = Canary([[1, 2]], [[-0.5]])
    project = Project(Home(tmp_path), build_config({}))
    parent = Policy(folder, 8, "digest", round=1, canary=canary, model_version="models:/demo/3")
    request = TrainRequest(folder, 8, "out", AlgorithmSpec(), OptimizerSpec())
    policy, _ = run_training(project, Idle(), Training(request, parent, 2, 0, (), list))  # type: ignore[arg-type]
    assert policy == replace(parent, round=2) == read(project.store, 2).published()
