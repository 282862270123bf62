"""Datasets and LoggedModels of a training run, looked up through MLflow's client."""

import json
from collections.abc import Callable
from pathlib import Path

import mlflow.data
import pytest
from mlflow.data.filesystem_dataset_source import FileSystemDatasetSource

from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.moved_database import follow_home
from rft_platform.model_registry.tracking import RunDataset, find_model, log_dataset, log_model, set_model_version
from tests.support.builders import Step


def rows(folder: Path, digest: str = "d" * 64) -> RunDataset:
    return RunDataset("r0001", digest, folder, "training", {"num_rows": 8, "judge_version": "judge-1"})


def log_a_training(registry: ModelRegistry, folder: Path) -> str:
    run = registry.training_run("first")
    log_dataset(run, rows(folder))
    model_id = log_model(run, "policy-v2", 2, {"weights_digest": "w2", "round": 1, "plugins_digest": None})
    run.log_steps([Step(1, {"loss": 0.5}), Step(2, {"loss": 0.25})], result=rows(folder).link(model_id))
    set_model_version(run, model_id, registry.model_name, 1)
    return model_id


def test_a_run_names_its_rows_and_its_models(registry: ModelRegistry, tmp_path: Path) -> None:
    model_id = log_a_training(registry, tmp_path)
    run = registry.training_run("first")
    found = run.client.get_run(run.run_id)
    (given,) = found.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("r0001", "d" * 36)
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "training")]
    assert json.loads(given.dataset.profile) == {"num_rows": 8, "judge_version": "judge-1", "digest": "d" * 64}
    source = mlflow.data.get_source(given)
    assert isinstance(source, FileSystemDatasetSource) and source.uri == str(tmp_path)
    assert [(output.model_id, output.step) for output in found.outputs.model_outputs] == [(model_id, 2)]

    model = run.client.get_logged_model(model_id)
    assert (model.name, model.status.value, model.source_run_id) == ("policy-v2", "READY", run.run_id)
    assert model.tags["round"] == "1" and "plugins_digest" not in model.tags
    assert (model.tags["registered_model"], model.tags["model_version"]) == ("demo-model", "1")
    assert [(m.key, m.value, m.step, m.dataset_name, m.dataset_digest) for m in model.metrics] == [
        ("train/loss", 0.25, 2, "r0001", "d" * 36)
    ]
    assert find_model(run, "w2") == model_id and find_model(run, "w4") is None


def test_a_repeated_training_adds_nothing(connect: Callable[[], ModelRegistry], tmp_path: Path) -> None:
    assert log_a_training(connect(), tmp_path) == log_a_training(connect(), tmp_path)
    run = connect().training_run("first")
    found = run.client.get_run(run.run_id)
    assert (len(found.inputs.dataset_inputs), len(found.outputs.model_outputs)) == (1, 1)
    history = run.client.get_metric_history(run.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]


def test_two_trainings_with_equal_weights_have_two_models(registry: ModelRegistry) -> None:
    first, second = (registry.training_run(name) for name in ("first", "second"))
    assert log_model(first, "policy-v2", 2, {"weights_digest": "w"}) != log_model(
        second, "policy-v2", 2, {"weights_digest": "w"}
    )


@pytest.mark.slow
def test_the_source_follows_a_moved_home(tmp_path: Path) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    home.mkdir()
    first = ModelRegistry(f"sqlite:///{home}/mlflow/mlflow.db", home / "mlflow" / "artifacts", "demo", "demo-model")
    log_a_training(first, home / "rounds" / "r0001")
    log_dataset(first.training_run("first"), RunDataset("tasks", "t", "owner/tasks", "evaluation", {}))
    home.rename(moved)
    follow_home(moved / "mlflow" / "mlflow.db")
    again = ModelRegistry(f"sqlite:///{moved}/mlflow/mlflow.db", moved / "mlflow" / "artifacts", "demo", "demo-model")
    run = again.training_run("first")
    sources = {each.dataset.name: each.dataset.source for each in run.client.get_run(run.run_id).inputs.dataset_inputs}
    assert {name: json.loads(source)["uri"] for name, source in sources.items()} == {
        "r0001": str(moved / "rounds" / "r0001"), "tasks": "owner/tasks",
    }  # fmt: skip
