"""Homes with a copy in a folder, which stands for an object store."""

from pathlib import Path

import pytest

from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.mirror import HomeMirror, open_mirror
from tests.experience.samples import rollouts


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated at once, and a driver writes its heartbeat twenty times a second."""
    monkeypatch.setattr("rft_platform.object_store.remote_files._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("rft_platform.object_store.driver_heartbeat._BEAT_S", 0.05)


@pytest.fixture
def slower_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that another home sees within three intervals on a loaded machine, too."""
    monkeypatch.setattr("rft_platform.object_store.driver_heartbeat._BEAT_S", 0.3)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/project"


def drives(tmp_path: Path, name: str, url: str) -> tuple[Path, HomeMirror]:
    """A home that drives the project at ``url``."""
    root = tmp_path / name
    root.mkdir(exist_ok=True)
    mirror = open_mirror(root, url)
    mirror.take_over()
    return root, mirror


def explored(root: Path, number: int = 1) -> ExperienceStore:
    """A round with rows and the note that ends its stage."""
    store = ExperienceStore(root / "rounds")
    store.write_rollouts(number, 0, rollouts(round=number))
    store.write_note(number, "explore", {"rows": 4})
    return store
