"""Selection of traffic: rates hold, runs stay whole, marks last for their time, the highest priority decides."""

import pytest

from rft_platform.common.errors import UserError
from rft_platform.online.traffic.selection import (
    ExplicitMarkingStrategy,
    SamplingRateStrategy,
    Selection,
    SelectionContext,
    SelectionDecision,
    unit_of,
)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_the_rate_holds_and_is_the_same_for_all_calls_of_a_run(rate) -> None:
    strategy = SamplingRateStrategy.of(rate)
    decisions = [strategy.should_select({}, {}, SelectionContext(f"run-{n}")).accept for n in range(4000)]
    again = [strategy.should_select({}, {"other": 1}, SelectionContext(f"run-{n}")).accept for n in range(4000)]
    assert decisions == again
    assert sum(decisions) / 4000 == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_refused(rate) -> None:
    with pytest.raises(UserError, match="expected a number from 0 to 1"):
        SamplingRateStrategy.of(rate)


def test_a_mark_by_header_or_metadata_lasts_for_its_time() -> None:
    strategy = ExplicitMarkingStrategy(ttl_s=60)

    def decide(now: float, unit: str = "u", headers=None, request=None) -> SelectionDecision:
        return strategy.should_select(request or {}, {}, SelectionContext(unit, headers or {}, now=now))

    assert not decide(0).accept
    assert decide(1, headers={"x-rft-mark": "high-quality"}).accept
    assert decide(30).accept
    assert not decide(30, unit="other").accept
    assert not decide(62).accept
    assert decide(70, request={"metadata": {"rft_mark": "good"}}).accept
    assert not decide(71, unit="x", request={"metadata": "no object"}).accept


def test_the_highest_priority_that_accepts_decides() -> None:
    selection = Selection([SamplingRateStrategy.of(0.0), ExplicitMarkingStrategy()])
    assert selection.decide({}, {}, "u", {"x-rft-mark": "yes"}, "").reason == "marked"
    assert selection.decide({}, {}, "v", {}, "").reason == "sampled at rate 0"
    assert Selection([]).decide({}, {}, "v", {}, "").accept


def test_a_unit_is_a_run_of_a_task_or_a_conversation_of_one_tenant() -> None:
    places = [
        {"task_id": "t", "run_id": "0"}, {"task_id": "u", "run_id": "0"}, {"task_id": "t", "run_id": "1"},
        {"task_id": "t/0", "run_id": "0"}, {"task_id": "t", "run_id": "0/0"}, {"run_id": "0"}, {"conversation": "0"},
        {"task_id": "t"}, {"task_id": "", "run_id": ""},
    ]  # fmt: skip
    units = {unit_of(tenant, place, f"m{number}") for tenant in "ab" for number, place in enumerate(places)}
    assert len(units) == 2 * len(places)
    for same in ({"task_id": "t", "run_id": "0"}, {"conversation": "c"}, {"run_id": "0"}):
        assert unit_of("a", same, "m1") == unit_of("a", same, "m2")
    assert unit_of("a", {"conversation": "c", "run_id": "0"}, "m") == unit_of("a", {"conversation": "c"}, "m")
