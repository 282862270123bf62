"""The driver's memory stays flat over many rounds."""

import gc
from pathlib import Path

import dagster as dg
import pytest
import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.rounds.planning.plan import Action, Plan
from rft_platform.rounds.project.project import Project
from rft_platform.run import driver

ROUNDS = 45


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="rft_round"))
def judged_experiences(context: dg.AssetExecutionContext) -> None:
    context.log.info("judged")


DEFS = dg.Definitions([judged_experiences], jobs=[dg.define_asset_job("explore_job", [judged_experiences])])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n')
    config = {
        "model": {"model_path": "unused"},
        "buffer": {"batch_size": 1, "total_steps": ROUNDS, "explorer_input": {"taskset": {"path": str(tasks)}}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    return Project.open(home)


@pytest.mark.slow
def test_what_runs_leave_behind_is_collected(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are counted, not bytes: a run leaves reference cycles, which Python alone would collect very late."""
    counts: list[int] = []
    usual = gc.get_threshold()

    def plan_next(state: object) -> Plan:
        assert gc.get_threshold() == (*usual[:2], 50), "Python itself scans all libraries rarely"
        counts.append(len(gc.get_objects()))
        return Plan(actions=(Action("explore", len(counts), 0),)) if len(counts) <= ROUNDS else Plan(finished=True)

    monkeypatch.setattr(driver, "plan_next", plan_next)
    monkeypatch.setattr(driver, "observe", lambda *arguments, **named: None)
    result = driver.drive(project, DEFS)
    assert result.finished and gc.get_threshold() == usual
    assert len(result.launched) == ROUNDS
    assert counts[40] - counts[10] < 30 * 30, counts  # both right after a collection; a run leaves about 700
