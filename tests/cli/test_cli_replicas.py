"""A project with two engine replicas, seen from its commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.inference.client import EngineClient
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import connect_engine
from rft_platform.run import start
from rft_platform.run.machine import process_findings

pytestmark = pytest.mark.slow


@pytest.fixture
def project(home: Home, write_config: Callable[..., Path], tiny_model: Path) -> Callable[[int], Project]:
    """``project(n)``: the project, with n replicas."""

    def opened(replicas: int) -> Project:
        sections = {
            "model": {"model_path": str(tiny_model)},
            "engine": {"device": "cpu", "kind": "transformers"},
            "explorer": {"rollout_model": {"engine_num": replicas}},
        }
        start.write_config(home, load_config(write_config(**sections)))
        return Project.open(home)

    return opened


def test_replicas_are_started_found_again_looked_at_ended_and_stopped(
    home: Home, project: Callable[[int], Project], tiny_model: Path, rft: Callable[..., Result]
) -> None:
    with connect_engine(project(2)) as pool, connect_engine(project(2)) as again:  # type: ignore[attr-defined]
        assert isinstance(pool, EnginePool) and isinstance(again, EnginePool)
        assert [one.url for one in pool.replicas.serving()] == [one.url for one in again.replicas.serving()]
        assert list(home.cluster.leases()) == ["engine-1", "engine"]
        findings = list(process_findings(home))
        assert [finding.level for finding in findings] == ["note", "note"]
        assert all("serves policy version 0" in finding.text for finding in findings)
        pool.replicas.serving()[1].client.update_weights(tiny_model, 3)
        *_, differing = process_findings(home)
        assert differing.level == "warning" and "policy versions 0, 3" in differing.text

    with connect_engine(project(1)) as alone:  # type: ignore[attr-defined]
        assert isinstance(alone, EngineClient), "one engine: no pool in between"
        assert alone.url == pool.replicas.serving()[0].url
    assert list(home.cluster.leases()) == ["engine"]

    home.cluster.wait_for_starts("engine*")
    assert rft("stop").stdout.count("stopped") == 1
    assert not home.cluster.leases()
