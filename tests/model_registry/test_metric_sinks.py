"""Every destination of metrics, read back from its own files: the same names and x axes, and no point twice."""

import json
import logging
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rft_platform.model_registry.experiment_trackers import SwanlabRun, WandbRun, has_login
from rft_platform.model_registry.metric_sinks import MetricSink, TensorBoardRun
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.tracking import metric_name
from tests.model_registry.record_log import records
from tests.support.builders import Step

Curves = dict[str, list[tuple[int, float]]]
CONFIG = {"algorithm": {"optimizer": {"lr": 0.001}}, "project": "sums"}


class Destination(ABC):
    """A sink and the reader of what it has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def open(self) -> MetricSink:
        """The sink, as a new process opens it."""

    @abstractmethod
    def read(self) -> Curves:
        """All points, in the order in which they were written."""


class TensorBoard(Destination):
    def open(self) -> MetricSink:
        return TensorBoardRun(self.folder, "project one/run")

    def read(self) -> Curves:
        events = EventAccumulator(str(self.folder / "project_one_run")).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Wandb(Destination):
    def open(self) -> MetricSink:
        return WandbRun.of(self.folder / "wandb", "sums", "one", CONFIG)

    def read(self) -> Curves:
        found: Curves = defaultdict(list)
        for values in self.history():
            axis = next(name for name in values if name.startswith("axis/"))
            for name in values.keys() - {axis}:
                if not name.startswith("_"):
                    found[name].append((int(values[axis]), float(values[name])))
        return dict(found)

    def history(self) -> list[dict[str, float]]:
        return [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in self.records()
            if record.WhichOneof("record_type") == "history"
        ]

    def records(self) -> Iterator:
        from wandb.proto.wandb_internal_pb2 import Record

        for file in sorted(self.folder.glob("wandb/offline-run-*/run-*.wandb")):
            yield from (Record.FromString(data) for data in records(file))


class Swanlab(Destination):
    def open(self) -> MetricSink:
        return SwanlabRun.of(self.folder / "swanlab", "sums", "one", CONFIG)

    def read(self) -> Curves:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record

        found: Curves = defaultdict(list)
        for file in sorted(self.folder.glob("swanlab/run-*/*.swanlab")):
            for record in map(Record.FromString, records(file)):
                if record.HasField("scalar"):
                    found[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
        return dict(found)


@pytest.fixture(
    params=[
        TensorBoard,
        pytest.param(Wandb, marks=pytest.mark.slow),
        pytest.param(Swanlab, marks=pytest.mark.slow),
    ]
)
def destination(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Destination:
    """A destination without a login: nothing leaves the machine."""
    kind: type[Destination] = request.param
    if kind is not TensorBoard:
        package = kind.__name__.lower()
        pytest.importorskip(package, reason=f"needs {package}: pip install 'rft-platform[{package}]'")
    without_login(monkeypatch, tmp_path)
    return kind(tmp_path / "home")


def without_login(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(folder / "no-netrc"))
    monkeypatch.setenv("SWANLAB_ROOT", str(folder / "no-swanlab"))


def test_steps_and_rounds_are_read_back(destination: Destination) -> None:
    destination.open().log_steps("r0001-train", [Step(1, {"loss": 0.5, "mfu": 0.25}), Step(2, {"loss": 0.25})])
    destination.open().log_steps("r0002-train", [Step(3, {"loss": float("inf")})])
    evaluated = {"sums/acc": {"mean@4": 0.75}, "engine": "vllm", "ok": True}
    destination.open().log_round("r0002-eval", 2, evaluated, prefix="eval/")
    assert destination.read() == {
        "train/loss": [(1, 0.5), (2, 0.25), (3, float("inf"))],
        "train/mfu": [(1, 0.25)],
        "eval/sums/acc/mean@4": [(2, 0.75)],
    }


def test_a_part_that_is_written_again_adds_no_points(destination: Destination) -> None:
    for _ in range(2):
        destination.open().log_steps("r0001-train", [Step(1, {"loss": 1.0}), Step(2, {"loss": 2.0})])
        destination.open().log_round("r0001-eval", 1, {})
    assert destination.read() == {"train/loss": [(1, 1.0), (2, 2.0)]}


def test_a_part_with_other_values_ends_with_these(destination: Destination) -> None:
    destination.open().log_steps("r0001-train", [Step(1, {"loss": 1.0}), Step(2, {"loss": 2.0})])
    destination.open().log_steps("r0001-train", [Step(1, {"loss": 4.0}), Step(2, {"loss": 5.0})])
    assert destination.read()["train/loss"][-2:] == [(1, 4.0), (2, 5.0)]


@pytest.mark.slow
def test_a_run_of_weights_and_biases_is_one_over_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    without_login(monkeypatch, tmp_path)
    wandb = Wandb(tmp_path)
    for round_number in (1, 2):
        wandb.open().log_steps(f"r{round_number}", [Step(round_number, {"loss": 1.0})])
    assert [values["_step"] for values in wandb.history()] == [0, 1]  # the service refuses descending numbers
    runs = [record.run for record in wandb.records() if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1 and {run.project for run in runs} == {"sums"}
    assert {item.key: json.loads(item.value_json) for item in runs[0].config.update}["algorithm.optimizer.lr"] == 0.001
    axes = {
        record.metric.glob_name: record.metric.step_metric
        for record in wandb.records()
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes == {"train/*": "axis/optimizer_step", "round/*": "axis/round", "eval/*": "axis/round"}
    assert not [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variable"), [(Wandb, "WANDB_MODE"), (Swanlab, "SWANLAB_MODE")])
def test_a_service_that_fails_costs_a_warning_and_is_tried_again(
    kind: type[Destination], variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    pytest.importorskip(kind.__name__.lower())
    without_login(monkeypatch, tmp_path)
    destination = kind(tmp_path / "home")
    monkeypatch.setenv(variable, "nonsense")
    with caplog.at_level(logging.WARNING):
        destination.open().log_steps("r1", [Step(1, {"loss": 1.0})])
    assert "did not take the metrics of r1" in caplog.text
    monkeypatch.setenv(variable, "offline")
    destination.open().log_steps("r1", [Step(1, {"loss": 1.0})])
    assert destination.read() == {"train/loss": [(1, 1.0)]}


@pytest.mark.slow
def test_mlflow_has_the_same_names_but_for_some_characters(registry: ModelRegistry) -> None:
    run = registry.training_run("one")
    run.log_steps([Step(1, {"loss": 0.5, "mfu": 0.25}), Step(2, {"loss": 0.25})])
    run.log_round(2, {"sums/my:acc": {"mean@4": 0.75}, "engine": "vllm", "ok": True}, prefix="eval/")
    names = set(run.client.get_run(run.run_id).data.metrics)
    assert names == {"train/loss", "train/mfu", metric_name("eval/sums/my:acc/mean@4")}
    assert metric_name("eval/sums/my:acc/mean@4").startswith("eval/sums/my_acc/mean_at_4-")  # and a digest of the name


def test_a_killed_writer_leaves_the_last_complete_file(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.open().log_steps("r0001-train", [Step(1, {"loss": 1.0})])

    def broken() -> Iterator[Step]:
        yield Step(1, {"loss": 3.0})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        board.open().log_steps("r0001-train", broken())
    assert board.read() == {"train/loss": [(1, 1.0)]}


def test_logins_are_those_of_netrc(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    assert not has_login("api.wandb.ai", file)
    file.write_text("machine api.wandb.ai login user password secret\n")
    file.chmod(0o600)
    assert has_login("api.wandb.ai", file) and not has_login("other", file)
    file.write_text("machine machine\n")
    assert not has_login("api.wandb.ai", file)


def test_no_sink_imports_its_package_before_it_writes() -> None:
    program = (
        "import sys, rft_platform.rounds.reporting.run_log as log\n"
        "import rft_platform.model_registry.experiment_trackers, rft_platform.model_registry.experiment_trackers\n"
        "print([name for name in ('wandb', 'swanlab', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
