import logging
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rft_platform.common.errors import DamagedError, RegistryError, StorageError, UserError
from rft_platform.common.files import digest_file, write_sealed_json
from rft_platform.model_registry.mlflow_client import open_client
from rft_platform.model_registry.models import ModelRegistry
from rft_platform.model_registry.sqlite_reader import read_training_run, read_versions


def checkpoint(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / "checkpoints" / f"global_step_{step}"
    if not folder.exists():
        write_sealed_json(folder / "manifest.json", {"files": {}})
    return folder


def register(registry: ModelRegistry, tmp_path: Path, step: int, digest: str = "") -> int:
    tags = {"weights_digest": digest or f"d{step}", "round": step // 8, "judge_version": None}
    return registry.register_checkpoint(checkpoint(tmp_path, step), step, tags)


def test_a_checkpoint_is_one_version_however_often_it_is_registered(connect, tmp_path: Path) -> None:
    registry = connect()
    run_id = registry.training_run("first").run_id
    folder = checkpoint(tmp_path, 8)
    version = registry.register_checkpoint(folder, 8, {"weights_digest": "d8", "round": 1, "git_sha": None}, run_id)

    assert connect().register_checkpoint(folder, 8, {"weights_digest": "d8", "round": 1}, run_id) == version
    assert register(registry, tmp_path, 8, digest="other") == version + 1
    assert register(registry, tmp_path, 16, digest="d8") == version + 2

    experiment = open_client(registry.tracking_uri).get_experiment_by_name(registry.project)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    first = registry.versions()[0]
    assert (first.version, first.folder, first.run_id) == (version, folder, run_id)
    assert first.tags == {"weights_digest": "d8", "round": "1", "policy_version": "8", "checkpoint": str(folder)}
    assert registry.resolve("models:/demo-model@candidate").version == version + 2


def test_a_checkpoint_without_a_digest_is_refused(registry: ModelRegistry, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights_digest"):
        registry.register_checkpoint(checkpoint(tmp_path, 8), 8, {"round": 1})


def test_promotions_are_undone_in_order(registry: ModelRegistry, tmp_path: Path) -> None:
    first, second, third = (register(registry, tmp_path, step) for step in (8, 16, 24))
    assert registry.champion() is None
    for version in (first, third, third):
        registry.promote(version)
    champion = registry.champion()
    assert champion is not None
    assert (champion.version, champion.aliases, champion.tags["previous_champion"]) == (
        third, ("candidate", "champion"), str(first),
    )  # fmt: skip

    assert registry.rollback().version == first
    assert "rolled_back_at" in registry.resolve(f"models:/demo-model/{third}").tags
    with pytest.raises(UserError, match="first champion"):
        registry.rollback()
    registry.promote(second)
    assert registry.rollback().version == first


def test_rollback_to_a_version_without_weights_changes_nothing(registry: ModelRegistry, tmp_path: Path) -> None:
    """Retention keeps the champion and its predecessor; a repeated rollback goes further back."""
    first, second, third = (register(registry, tmp_path, step) for step in (8, 16, 24))
    for version in (first, second, third):
        registry.promote(version)
    (checkpoint(tmp_path, 8) / "thinned.json").write_text("{}")
    assert registry.rollback().version == second
    for attempt in (registry.last_promoted, registry.rollback):
        with pytest.raises(DamagedError, match=r"version 1 in .*trainer\.max_checkpoints_to_keep"):
            attempt()
    champion = registry.champion()
    assert champion is not None
    assert (champion.version, champion.tags["previous_champion"]) == (second, str(first))
    assert "rolled_back_at" not in champion.tags


def test_rollback_without_a_champion_is_refused(registry: ModelRegistry) -> None:
    with pytest.raises(UserError, match="there is no champion"):
        registry.rollback()


def test_a_version_has_a_description_that_follows_its_tags(registry: ModelRegistry, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 8)
    origin = {"weights_digest": "d8", "round": 3, "algorithm": "grpo", "base_model": "/models/small"}
    version = registry.register_checkpoint(folder, 8, origin)

    def description() -> str:
        return str(registry._open()[0].get_model_version("demo-model", str(version)).description)

    assert "Policy after round 3." in description()
    assert "Trained with `grpo`, from the base model `/models/small`." in description()
    assert f'mlflow.transformers.load_model("models:/demo-model/{version}")' in description()
    assert "Held-out" not in description()
    registry.annotate(version, {"sampled_pass": 0.95, "greedy_pass": None})
    assert "Held-out tasks: 95.0% of the sampled runs pass." in description()
    assert "greedy_pass" not in registry.resolve(f"models:/demo-model/{version}").tags


def test_addresses_are_resolved_or_explained(registry: ModelRegistry, tmp_path: Path) -> None:
    version = register(registry, tmp_path, 8)
    registry.annotate(version, {"gate": "passed"})
    found = registry.resolve(f"models:/demo-model/{version}")
    assert (found.uri, found.folder, found.tags["gate"]) == (
        "models:/demo-model/1", checkpoint(tmp_path, 8), "passed",
    )  # fmt: skip

    with pytest.raises(UserError, match=r"versions 1\.\.1 and aliases candidate"):
        registry.resolve("models:/demo-model@champion")
    with pytest.raises(UserError, match="nobody has no versions"):
        registry.resolve("models:/nobody/3")
    with pytest.raises(UserError, match=r"expected models:/NAME@alias"):
        registry.resolve("demo-model")
    shutil.rmtree(found.folder)
    with pytest.raises(StorageError, match="does not exist"):
        registry.resolve("models:/demo-model@candidate")


@pytest.mark.parametrize("uri", ["mlruns", "file:///mlruns", ""])
def test_a_store_that_is_no_database_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match="expected sqlite:///FILE"):
        open_client(uri)


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        open_client(f"sqlite:///{tmp_path}/file/mlflow.db")


def test_a_server_that_is_not_there_is_reported_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with pytest.raises(RegistryError, match="does not answer"):
            open_client(f"http://127.0.0.1:{closed.getsockname()[1]}")


def test_names_mlflow_would_choke_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="project 'a/b'"):
        ModelRegistry("sqlite:///x.db", None, "a/b", "model")


@pytest.mark.slow
def test_a_fresh_store_is_made_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = ModelRegistry(f"sqlite:///{tmp_path}/new/mlflow.db", tmp_path / "artifacts", "demo", "demo-model")
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.INFO):
        experiment = registry.prepare()
    assert heard == []
    assert caplog.messages == []
    assert registry.prepare() == experiment


def test_importing_the_registry_imports_no_mlflow() -> None:
    modules = "rft_platform.rounds.reporting.lineage, rft_platform.model_registry.models"
    code = f"import sys, {modules}; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'rft_platform.model_registry.models'" in loaded
    for heavy in ("mlflow", "pandas", "pyarrow", "duckdb", "sqlalchemy"):
        assert f"'{heavy}'" not in loaded


def test_weights_that_are_not_what_was_registered_are_not_handed_out(registry: ModelRegistry, tmp_path: Path) -> None:
    version, folder = register(registry, tmp_path, 8), checkpoint(tmp_path, 8)
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": {"size": 7, "sha256": digest_file(folder / "model.safetensors")}}
    write_sealed_json(folder / "manifest.json", {"files": files})
    assert registry.resolve(f"models:/demo-model/{version}", verify=True).folder == folder

    (folder / "model.safetensors").write_bytes(b"weighty")
    assert registry.resolve(f"models:/demo-model/{version}").folder == folder  # lineage reads no weights
    with pytest.raises(DamagedError, match=r"which is damaged: model\.safetensors was changed after it was written"):
        registry.resolve(f"models:/demo-model/{version}", verify=True)


def test_the_training_run_is_found_in_the_file(registry: ModelRegistry, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    assert read_training_run(uri, "demo", "first") is None, "before the first run"
    registry.training_run("second")
    run = registry.training_run("first")
    assert read_training_run(uri, "demo", "first") == ("1", run.run_id)
    page = f"/mlflow#/experiments/1/runs/{run.run_id}/model-metrics"
    assert registry.run_link("first").startswith(f"{page}?")
    assert read_training_run("http://127.0.0.1:1", "demo", "first") is None
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"damaged")
    assert read_training_run(uri, "demo", "first") is None


def test_the_file_is_read_in_a_folder_with_characters_of_urls(empty_store: Path, tmp_path: Path) -> None:
    database = tmp_path / "a#b%c" / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True)
    shutil.copy(empty_store, database)
    uri = f"sqlite:///{database}"
    run = ModelRegistry(uri, database.parent / "artifacts", "demo", "demo-model").training_run("first")
    assert read_training_run(uri, "demo", "first") == ("1", run.run_id)
    assert read_versions(uri, "demo-model") == []
    assert [path.name for path in tmp_path.iterdir()] == ["a#b%c"]
