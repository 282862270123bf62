"""The schedule: decided by the seed alone, fair to every target."""

from collections import Counter

import pytest

from chaos.io_faults import plan_io_faults
from chaos.schedule import TARGETS, check_targets, schedule, shares
from rft_platform.common.errors import UserError

EVERY = [*TARGETS["driver"], *(target for target in TARGETS["daemon"] if target not in TARGETS["driver"])]


def test_equal_seeds_plan_equal_kills_and_others_do_not():
    assert schedule(3, 50, TARGETS["driver"]) == schedule(3, 50, TARGETS["driver"])
    assert schedule(3, 50, TARGETS["driver"]) != schedule(4, 50, TARGETS["driver"])


def test_a_shorter_schedule_is_a_prefix_of_a_longer_one():
    """So a violation can be replayed with fewer kills."""
    assert schedule(3, 50, TARGETS["daemon"])[:20] == schedule(3, 20, TARGETS["daemon"])


def test_every_target_gets_its_share_and_numbers_run_on():
    planned = schedule(1, 70, TARGETS["daemon"], first=31)
    assert [kill.number for kill in planned] == list(range(31, 101))
    counts = Counter(kill.target for kill in planned)
    assert set(counts) == set(TARGETS["daemon"])
    assert min(counts.values()) >= 6
    assert {kill.how for kill in planned} == {"kill", "stop", "term", "stop+kill"}
    assert any(kill.point == "starting" for kill in planned)


def test_only_the_requested_targets_are_killed():
    assert {kill.target for kill in schedule(1, 40, ["engine"])} == {"engine"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["driver", "engine"], {"driver": 40, "daemon": 0}),
        (["engine", "trainer"], {"driver": 40, "daemon": 0}),
        (["daemon", "engine"], {"driver": 0, "daemon": 40}),
        (EVERY, {"driver": 30, "daemon": 10}),
    ],
)
def test_kills_are_assigned_to_modes_with_their_targets(targets, expected):
    assert shares(40, targets) == expected


def test_on_ray_workers_are_killed_during_rollouts_and_servers_fail_without_a_signal():
    planned = schedule(2, 100, TARGETS["ray"], mode="ray")
    points = {target: {kill.point for kill in planned if kill.target == target} for target in TARGETS["ray"]}
    assert points["worker_actor"] == {"rollouts"} and points["raylet_training"] == {"training"}
    ways = {target: {kill.how for kill in planned if kill.target == target} for target in TARGETS["ray"]}
    assert ways["raylet_rollouts"] == ways["engine_actor"] == {"kill"}
    assert ways["s3_slow"] == ways["postgres"] == {"fault"}
    assert len(ways["trainer"]) > 1


def test_an_unknown_target_is_refused_with_those_that_are_known():
    with pytest.raises(UserError, match=r"kernel.*expected some of code_server, daemon, driver"):
        check_targets(["engine", "kernel"])
    assert check_targets(["engine", "engine", "driver"]) == ["engine", "driver"]


def test_equal_seeds_plan_equal_file_system_faults(tmp_path):
    plans = [plan_io_faults(3, 40, tmp_path / "faults", tmp_path / "home") for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0] != plan_io_faults(4, 40, tmp_path / "faults", tmp_path / "home")
    assert plans[0].left() == 40
    assert {bool(fault.error) for fault in plans[0].waiting} == {True, False}


def test_faults_are_injected_into_run_workers_daemon_and_trainer(tmp_path):
    plan = plan_io_faults(3, 60, tmp_path / "faults", tmp_path / "home", "daemon")
    targets = [record.kill.target for record in plan.records()]
    assert set(targets) == {"run_worker", "daemon", "trainer"}
    assert targets.count("run_worker") > 20
    assert {record.mode for record in plan.records()} == {"daemon"}
