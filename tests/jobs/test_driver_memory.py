"""The driver's memory stays flat over many rounds."""

import gc
from pathlib import Path

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.jobs import driver
from rft_platform.rounds.state import Action, Plan

ROUNDS = 45


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="rft_round"))
def judged_experiences(context: dg.AssetExecutionContext) -> None:
    context.log.info("judged")


DEFS = dg.Definitions([judged_experiences], jobs=[dg.define_asset_job("explore_job", [judged_experiences])])


class _Project:
    def __init__(self, home: Home) -> None:
        self.home = home


@pytest.mark.slow
def test_what_runs_leave_behind_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are counted, not bytes: a run leaves reference cycles, which Python alone would collect very late."""
    counts: list[int] = []

    def plan_next(state: object) -> Plan:
        counts.append(len(gc.get_objects()))
        return Plan(actions=(Action("explore", len(counts), 0),)) if len(counts) <= ROUNDS else Plan(finished=True)

    monkeypatch.setattr(driver, "plan_next", plan_next)
    monkeypatch.setattr(driver, "observe", lambda *arguments, **named: None)
    result = driver.drive(_Project(Home(tmp_path / "home")), DEFS)
    assert result.finished
    assert len(result.launched) == ROUNDS
    assert counts[40] < 1.02 * counts[10], counts  # both right after a collection
