"""Faults of a project on three raylets with its copy on S3: seeded, as ``python -m chaos --ray`` does dozens."""

from pathlib import Path

import pytest

from chaos.campaign import run_chaos
from chaos.invariants.context import Context
from chaos.invariants.copy import copy_equals_the_home
from chaos.records import summary
from chaos.scratch import make_scratch
from rft_platform.rounds.project.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
TARGETS = ["worker_actor", "raylet_rollouts", "s3_truncated"]


def test_a_project_on_ray_survives_a_lost_node_a_killed_worker_and_broken_requests(tmp_path: Path) -> None:
    for name in ("ray", "s3fs", "moto"):
        pytest.importorskip(name, reason="make test-s3 installs it")
    from chaos.ray_platform import ray_platform

    scratch = make_scratch(tmp_path / "scratch", workers=True)
    with ray_platform(1) as platform:
        outcomes = run_chaos(scratch, len(TARGETS), 5, TARGETS, print, platform=platform)
        project = Project.open(scratch.home("ray-1"))
        next(project.home.rounds.glob("r0001/judged/*.parquet")).unlink()
        lost = [found.message for found in copy_equals_the_home(Context(project, 1))]
    assert [str(violation) for outcome in outcomes for violation in outcome.violations] == []
    told = summary(outcomes)
    assert set(told["by_target"]) == set(TARGETS) and told["missed"] == 0
    assert outcomes[0].facts["spare_nodes"] == outcomes[0].facts["spare_nodes_used"] == 1
    assert outcomes[0].facts["largest_weight_difference"] <= 1e-6
    assert len(lost) == 1 and "has besides 1 files, rounds/r0001/judged" in lost[0]
