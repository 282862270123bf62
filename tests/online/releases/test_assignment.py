"""Assignment: sticky, by the share, independent between releases."""

import pytest

from rft_platform.online.releases.routing import CANDIDATE, Split, unit_of


def test_a_unit_keeps_its_arm_and_the_share_is_met() -> None:
    split = Split(0.3, "user", seed=1)
    arms = {f"user:{number}": split.arm(f"user:{number}") for number in range(20_000)}
    assert all(Split(0.3, "user", seed=1).arm(unit) == arm for unit, arm in arms.items())
    assert sum(arm == CANDIDATE for arm in arms.values()) / len(arms) == pytest.approx(0.3, abs=0.015)


def test_a_larger_share_keeps_the_units_of_the_candidate() -> None:
    units = [f"user:{number}" for number in range(2000)]
    small = {unit for unit in units if Split(0.1, "user", 7).arm(unit) == CANDIDATE}
    assert small < {unit for unit in units if Split(0.5, "user", 7).arm(unit) == CANDIDATE}


def test_releases_are_independent() -> None:
    units = [f"user:{number}" for number in range(10_000)]
    both = sum(Split(0.5, "user", 1).arm(unit) == Split(0.5, "user", 2).arm(unit) for unit in units)
    assert both / len(units) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("share", "expected"), [(0.0, {"base"}), (1.0, {"candidate"})])
def test_the_ends_of_the_share(share, expected) -> None:
    assert {Split(share, "request", 0).arm(str(number)) for number in range(500)} == expected


def test_the_unit_is_the_wanted_one_or_the_next_smaller() -> None:
    place = {"subject": "ann", "conversation": "c", "task_id": "t", "run_id": "0"}
    assert unit_of(place, "user", "r") == "subject:ann"
    assert unit_of(place, "conversation", "r") == "conversation:c"
    assert unit_of({"task_id": "t", "run_id": "0"}, "user", "r") == "run:t/0"
    assert unit_of(place, "request", "r") == unit_of({}, "user", "r") == "request:r"
