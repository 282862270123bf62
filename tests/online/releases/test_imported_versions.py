"""Weights of another project become a version that serves, with their origin; what is none is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import DamagedError, StorageError, UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.model_registry.manifests import read_manifest
from rft_platform.model_registry.models import SERVING, ModelRegistry
from rft_platform.online.project import project_in
from rft_platform.online.releases.versions import (
    MODEL,
    ServingAlias,
    import_checkpoint,
    imported_policies,
    policy_of_version,
    release_commands,
    servable_versions,
)
from rft_platform.online.traffic.project_traffic import oldest_trainable
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write
from rft_platform.training.checkpoint.manifest import Manifest, describe_files, write_manifest


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    """An online project with a published policy."""
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "reinforce++"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
            "synchronizer": {"max_staleness": 4},
        }
    )
    shutil.copytree(tiny_model, tmp_path / "base")
    project = project_in(Home(tmp_path / "home"), config)
    publish(project.store, Policy("model", 6, "0" * 64, round=0))
    return project


def checkpoint(folder: Path, seed: int = 5, **config: Any) -> Path:
    """A checkpoint of the tiny model as a DPO training of another project leaves it."""
    target = folder / "dpo" / f"global_step_{seed}"
    shutil.copytree(folder / "base", target)
    (target / "model.safetensors").write_bytes(f"weights {seed}".encode())
    if config:
        file = target / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (target / "trainer_state").mkdir()
    (target / "trainer_state" / "optimizer.safetensors").write_bytes(b"moments")
    lineage = {"project": "shop", "name": "helper-dpo", "round": 1, "data_digest": "d" * 64, "code_version": "1"}
    weights = digest_weights(target)
    files = describe_files(target)
    write_manifest(
        target,
        Manifest(
            seed, "/models/base", 0, "p", "r", weights, {"output": str(target)}, lineage, {}, 0.0, {}, "float32", files
        ),
    )
    return target


def test_an_imported_version_serves_by_decision_only_and_keeps_its_origin(project: Project, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    policy = import_checkpoint(project, None, source)
    assert import_checkpoint(project, None, source) == policy, "the same weights are imported once"
    manifest = read_manifest(Path(policy.folder))
    assert (manifest.lineage["name"], manifest.weights_digest) == ("helper-dpo", policy.weights_digest)
    shutil.rmtree(source)
    assert digest_weights(Path(policy.folder)) == policy.weights_digest
    assert not (Path(policy.folder) / "trainer_state").exists()
    assert imported_policies(project) == [policy]
    assert policy_of_version(project, policy.policy_version) == policy

    commands = release_commands(project)
    assert [(each.version, each.round, each.released) for each in servable_versions(project)] == [
        (6, 0, True), (policy.policy_version, None, False),
    ]  # fmt: skip
    assert commands.serving() == 6
    release = commands.canary(policy.policy_version, share=0.2)
    assert (release.base_version, release.candidate_version) == (6, policy.policy_version)
    commands.promote(policy.policy_version)
    assert commands.serving() == policy.policy_version
    assert oldest_trainable(project) == 2, "rows are as old as the project's own versions say"
    assert commands.roll_back() == 6


def test_a_second_import_has_the_next_number(project: Project, tmp_path: Path) -> None:
    one, two = (import_checkpoint(project, None, checkpoint(tmp_path, seed)) for seed in (5, 6))
    assert two.policy_version == one.policy_version + 1
    assert imported_policies(project) == [one, two]


def test_an_import_that_is_not_complete_hides_no_version(project: Project, tmp_path: Path) -> None:
    policy = import_checkpoint(project, None, checkpoint(tmp_path))
    folder = Path(policy.folder)
    shutil.copytree(folder, folder.with_name(".2.host-123-0a1b.tmp"))  # a copy that was killed before its rename
    assert imported_policies(project) == [policy]
    assert import_checkpoint(project, None, checkpoint(tmp_path, 6)).policy_version == policy.policy_version + 1


@pytest.mark.slow
def test_mlflow_names_the_version_that_serves_after_each_decision(
    project: Project, tmp_path: Path, empty_store: Path
) -> None:
    database = tmp_path / "mlflow.db"
    shutil.copy(empty_store, database)
    registry = ModelRegistry(f"sqlite:///{database}", tmp_path / "artifacts", "rft", "model")
    for number in (1, 2):
        folder, digest = checkpoint(tmp_path, number), f"{number}" * 64
        version = registry.register_checkpoint(folder, 8 * number, {"weights_digest": digest})
        publish(project.store, Policy(str(folder), 8 * number, digest, number, model_version=str(version)))
        write(project.store, number, RoundEvaluation(promoted=False))
    commands, alias = release_commands(project), ServingAlias(project, lambda _: registry)

    def serving() -> list[str]:
        alias.step()
        return [version.uri for version in registry.versions() + registry.of_policy(MODEL).versions()
                if SERVING in version.aliases]  # fmt: skip

    assert serving() == ["models:/model/2"]
    release = commands.canary(8, share=0.5)
    assert serving() == ["models:/model/2"], "the base of a canary serves"
    commands.store.finish(release.number, "promoted", 8, "better", {})
    assert serving() == ["models:/model/1"]
    registry.promote(2)
    assert serving() == ["models:/model/1"], "the champion is another version"
    commands.roll_back(16)
    assert serving() == ["models:/model/2"]
    imported = import_checkpoint(project, registry, checkpoint(tmp_path))
    commands.promote(imported.policy_version)
    assert serving() == ["models:/model-imported/1"]
    commands.promote(6)
    assert serving() == [], "the starting policy is no model version"
    commands.promote(None)
    assert serving() == ["models:/model/2"]
    assert ServingAlias(project, lambda _: registry).step() is None, "a start sets the same alias again"
    assert serving() == ["models:/model/2"]


class UnsteadyRegistry:
    """A registry of models that fails once and then gives each folder a number."""

    def __init__(self) -> None:
        self.failures = 1
        self.folders: list[Path] = []

    def of_policy(self, policy: str) -> "UnsteadyRegistry":
        assert policy == MODEL
        return self

    def training_run(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(run_id=name)

    def register_checkpoint(self, folder: Path, policy_version: int, tags: dict[str, Any], run_id: str) -> int:
        assert tags["weights_digest"] and tags["source"] and run_id
        if self.failures:
            self.failures -= 1
            raise StorageError("MLflow cannot be reached")
        if folder not in self.folders:
            self.folders.append(folder)
        return self.folders.index(folder) + 1


def test_a_repeated_import_registers_what_could_not_be_registered(project: Project, tmp_path: Path) -> None:
    registry: Any = UnsteadyRegistry()
    source = checkpoint(tmp_path)
    with pytest.raises(StorageError):
        import_checkpoint(project, registry, source)
    assert [each.model_version for each in imported_policies(project)] == [None]
    policy = import_checkpoint(project, registry, source)
    assert policy.model_version == "1"
    assert imported_policies(project) == [policy]
    lost: Any = UnsteadyRegistry()
    lost.failures = 0
    import_checkpoint(project, lost, source)
    assert lost.folders == [Path(policy.folder)]


@pytest.mark.slow
def test_a_version_is_imported_with_an_mlflow_server(project: Project, tmp_path: Path, mlflow_server: str) -> None:
    registry = ModelRegistry(mlflow_server, None, "shop", "shop-helper")
    source = checkpoint(tmp_path)
    policy = import_checkpoint(project, registry, source)
    assert policy.model_version == "1"
    assert import_checkpoint(project, registry, source) == policy
    (found,) = registry.of_policy(MODEL).versions()
    assert (found.folder, found.tags["weights_digest"]) == (Path(policy.folder), policy.weights_digest)


def test_what_cannot_serve_is_refused(project: Project, tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match="not a checkpoint"):
        import_checkpoint(project, None, tiny_model)
    with pytest.raises(UserError, match="another model: its num_hidden_layers is 99"):
        import_checkpoint(project, None, checkpoint(tmp_path, 7, num_hidden_layers=99))
    damaged = checkpoint(tmp_path, 8)
    (damaged / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DamagedError, match=r"model\.safetensors is 5 bytes long"):
        import_checkpoint(project, None, damaged)
    adapter = checkpoint(tmp_path, 9)
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="LoRA adapter"):
        import_checkpoint(project, None, adapter)
    assert imported_policies(project) == []
