"""The asset of releases: decisions from the launchpad, and the report."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from rft_platform.assets.online import release_report
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.releases.versions import release_commands
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish


@pytest.fixture
def project(tmp_path: Path) -> Project:
    config = {
        "project": "shop", "name": "helper", "mode": "serve", "checkpoint_root_dir": str(tmp_path / "checkpoints"),
        "model": {"model_path": str(tmp_path)},
        "algorithm": {"algorithm_type": "ppo"},
        "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
    }  # fmt: skip
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "rft.yaml").write_text(yaml.safe_dump(config))
    opened = open_project(Home(home))
    for version in range(3):
        publish(opened.store, Policy(str(tmp_path), version, f"digest {version}", round=version))
    return opened


def materialise(project: Project, **decision: object) -> dg.ExecuteInProcessResult:
    return dg.materialize(
        [release_report.of(PLAIN_NAMES)],
        resources={"project": ProjectResource(home=str(project.home.root))},
        run_config={"ops": {"release_report": {"config": decision}}},
        raise_on_error=False,
    )


def metadata(done: dg.ExecuteInProcessResult) -> dict[str, Any]:
    assert done.success
    (event,) = done.get_asset_materialization_events()
    return {
        name: value.records if isinstance(value, dg.TableMetadataValue) else value.value
        for name, value in event.materialization.metadata.items()
    }


def test_decisions_and_their_report(project) -> None:
    assert metadata(materialise(project))["traffic"] == {"0": 1.0, "1": 0.0, "2": 0.0}
    assert metadata(materialise(project, decision="promote", version=2, reason="good"))["serving"] == 2
    report = metadata(materialise(project, decision="ab", version=1, share=0.25))
    assert report["traffic"] == {"0": 0.0, "1": 0.25, "2": 0.75}
    assert len(report["comparison"]) == 3
    assert metadata(materialise(project, decision="rollback"))["serving"] == 2
    metadata(materialise(project, decision="canary", version=0))
    assert release_commands(project).store.running().kind == "canary"


def test_a_wrong_decision_fails_the_run(project) -> None:
    assert not materialise(project, decision="promote", version=9).success
    assert release_commands(project).store.served() is None
