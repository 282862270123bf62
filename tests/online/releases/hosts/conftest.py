"""Two hosts of one project: homes that serve and train, their shared place, and rounds that publish versions."""

from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.digests import MANIFEST, digest_weights
from rft_platform.common.files import write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.inference.canary import Canary
from rft_platform.online.project import open_project
from rft_platform.online.releases.shared_place import EXCHANGE_KEY, SharedPlace, shared_place
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from rft_platform.run.start import write_config
from rft_platform.training.checkpoint.manifest import describe_files


def host(folder: Path, mode: str, root: str, model: Path, **keys: Any) -> Project:
    """A home of its own with the project's configuration."""
    config = build_config(
        {
            "mode": mode, "project": "shop", "name": "helper", "checkpoint_root_dir": root,
            "model": {"model_path": str(model)}, "algorithm": {"algorithm_type": "ppo"},
            "buffer": {
                "train_batch_size": 4,
                "trainer_input": {
                    "experience_buffer": {"storage_type": "sql", "path": f"sqlite:///{folder.parent / 'traffic.db'}"}
                },
            },
            **keys,
        }
    )  # fmt: skip
    home = Home(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(home, config)
    return open_project(home)


KEY = "0123456789abcdef" * 2
DIGEST = "0" * 64


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXCHANGE_KEY, KEY)


@pytest.fixture(params=["folder", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """``checkpoint_root_dir``: a shared folder, or a URL whose files are copied."""
    place = tmp_path / "shared"
    place.mkdir()
    return str(place) if request.param == "folder" else f"file://{place}"


@pytest.fixture
def hosts(tmp_path: Path, root: str, tiny_model: Path) -> tuple[Project, Project]:
    return host(tmp_path / "a", "serve", root, tiny_model), host(tmp_path / "b", "train", root, tiny_model)


def place_of(project: Project) -> SharedPlace:
    place = shared_place(project)
    assert place is not None
    return place


def train(project: Project, number: int, *, promoted: bool = True) -> Policy:
    """What a round leaves behind: weights, and the notes of policy and evaluation."""
    folder = project.checkpoints / f"global_step_{number}"
    (folder / "trainer_state").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes([number]) * 1000)
    (folder / "trainer_state" / "moments").write_bytes(b"0" * 1000)
    write_sealed_json(folder / MANIFEST, {"files": describe_files(folder)})
    canary = Canary([[1, 2, number]], [[-0.5, -0.25]])
    digest = digest_weights(folder)
    policy = Policy(str(folder), number, digest, number, canary, model_version=str(number))
    write(project.store, number, Judged(mean_reward=0.25, figures={"examples": "secret"}))
    publish(project.store, policy)
    write(project.store, number, RoundEvaluation(promoted=promoted))
    return policy
