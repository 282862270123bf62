"""A project's numbers in TensorBoard and in trackers, where the configuration wants them there."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.schema.evaluation import METRIC_SINKS
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.run_log import charted, monitor_round, monitor_steps
from rft_platform.training.protocol import StepEvent


def project(folder: Path, **monitor) -> Project:
    return Project(Home(folder), build_config({"project": "sums", "name": "one", "monitor": monitor}))


def test_steps_and_evaluations_of_rounds_become_curves(tmp_path: Path) -> None:
    opened = project(tmp_path)
    for round_number in (1, 2):
        first = 2 * round_number - 1
        steps = [StepEvent(step, {"loss": 1 / step, "mfu": 0.5}) for step in (first, first + 1)]
        monitor_steps(opened, round_number, steps)
        monitor_round(opened, round_number, {"greedy_pass": round_number / 4, "taskset": "sums"}, prefix="eval/")
    monitor_steps(opened, 3, [])  # a no-op leaves nothing
    folder = tmp_path / "tensorboard" / "sums-one"
    assert len(list(folder.iterdir())) == 4
    events = EventAccumulator(str(folder)).Reload()
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == [1, 2, 3, 4]
    assert [e.value for e in losses] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert [(e.step, e.value) for e in events.Scalars("eval/greedy_pass")] == [(1, 0.25), (2, 0.5)]


def test_bounds_and_incomplete_runs_have_groups_of_charts_of_their_own() -> None:
    scores = dict.fromkeys(
        ("failed_runs", "mean_reward", "sampled_pass", "sampled_pass_low", "vs_start/mean_reward_high"), 0.5
    )
    assert list(charted(scores)) == [
        "incomplete/failed_runs",
        "mean_reward",
        "sampled_pass",
        "interval/sampled_pass_low",
        "interval/vs_start/mean_reward_high",
    ]


def test_curves_are_written_to_the_configured_sinks(tmp_path: Path) -> None:
    chosen = tmp_path / "monitor" / "tensorboard"
    monitor_steps(project(tmp_path, tensorboard_dir=str(chosen)), 1, [StepEvent(1, {"loss": 1.0})])
    assert len(list((chosen / "sums-one").iterdir())) == 1 and not (tmp_path / "tensorboard").exists()


def test_mlflow_alone_writes_no_event_file(tmp_path: Path) -> None:
    monitor_steps(project(tmp_path, monitor_type="mlflow"), 1, [StepEvent(1, {"loss": 1.0})])
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("service", "files"), [("wandb", "offline-run-*/run-*.wandb"), ("swanlab", "run-*/*.swanlab")])
def test_a_tracker_gets_the_steps_of_a_project(
    service: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(service, reason=f"needs {service}: pip install 'rft-platform[{service}]'")
    monkeypatch.setenv(f"{service.upper()}_MODE", "offline")
    opened = project(tmp_path, monitor_type=["tensorboard", service])
    for _ in range(2):  # a repeated stage
        monitor_steps(opened, 1, [StepEvent(1, {"loss": 1.0})])
    (stored,) = (tmp_path / service).glob(files)
    assert b"train/loss" in stored.read_bytes()
    assert (tmp_path / "tensorboard" / "sums-one").is_dir()


def test_a_package_adds_a_destination_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package is a module and the file ``entry_points.txt`` beside it."""
    package = tmp_path / "installed"
    (package / "curves-1.0.dist-info").mkdir(parents=True)
    (package / "curves-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: curves\nVersion: 1.0\n")
    point = f"[{METRIC_SINKS}]\ncurves = curves_of_a_plugin:Curves\n"
    (package / "curves-1.0.dist-info" / "entry_points.txt").write_text(point)
    (package / "curves_of_a_plugin.py").write_text(PLUGIN)
    with pytest.raises(UserError, match=r"monitor\.monitor_type: got 'curves'; expected.*entry point of the group"):
        project(tmp_path, monitor_type=["mlflow", "curves"])
    monkeypatch.syspath_prepend(package)
    monitor_steps(project(tmp_path, monitor_type=["mlflow", "curves"]), 1, [StepEvent(1, {"loss": 1.0})])
    assert (tmp_path / "curves" / "one").read_text() == "sums one optimizer_step [(1, {'train/loss': 1.0})]"


PLUGIN = """
from rft_platform.model_registry.metric_sinks import MetricSink


class Curves(MetricSink):
    def __init__(self, folder, project, name, config):
        self.file, self.title = folder / config["name"], f"{project} {config['name']}"

    def write(self, key, axis, points):
        self.file.parent.mkdir(parents=True)
        self.file.write_text(f"{self.title} {axis} {points}")
"""
