"""The loop's brain, alone: every launch and every wait follows from the state it is shown."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.experience.file_names import round_key, round_number
from rft_platform.rounds.planning.plan import Action, LaunchState, ProjectState, RoundState, plan_next

DONE, RUNNING = LaunchState(done=True), LaunchState(running=True)


def project(*rounds: tuple[LaunchState, LaunchState], **settings: object) -> ProjectState:
    states = tuple(RoundState(i + 1, explore, sync) for i, (explore, sync) in enumerate(rounds))
    return ProjectState(rounds=states, **{"rounds_budget": 3, **settings})  # type: ignore[arg-type]


def launches(state: ProjectState) -> list[tuple[str, int]]:
    return [(action.kind, action.round) for action in plan_next(state).actions]


def test_fresh_project_explores_round_one_first():
    plan = plan_next(project())
    assert plan.actions == (Action("explore", 1, 0),)
    assert plan.waiting == ("r0001 trains when it is explored",)


def test_warm_start_comes_before_everything():
    assert launches(project(warm_start=LaunchState())) == [("warm_start", 0)]
    assert plan_next(project(warm_start=RUNNING)).waiting == ("warm_start is running",)
    assert launches(project(warm_start=DONE)) == [("explore", 1)]


def test_without_offset_exploration_waits_for_training():
    plan = plan_next(project((DONE, LaunchState())))
    assert [a.run_key for a in plan.actions] == ["sync:r0001:0"]
    assert plan.waiting == ("r0002 explores after r0001 is trained",)
    assert launches(project((DONE, DONE))) == [("explore", 2)]


def test_with_offset_one_exploration_and_training_overlap():
    state = project((DONE, LaunchState()), offset_rounds=1)
    assert launches(state) == [("explore", 2), ("sync", 1)]
    ahead = project((DONE, RUNNING), (DONE, LaunchState()), offset_rounds=1)
    assert plan_next(ahead).actions == ()
    assert "r0003 explores after r0001 is trained" in plan_next(ahead).waiting


def test_budget_ends_the_project():
    assert plan_next(project(*[(DONE, DONE)] * 3)).finished
    assert not plan_next(project(*[(DONE, DONE)] * 2)).finished


def failed_launch(**changes: object) -> LaunchState:
    return replace(LaunchState(failures=1, ended=1, cause="engine: gone", failed_at=100.0), **changes)  # type: ignore[arg-type]


def test_a_failed_launch_is_repeated_under_a_new_key_then_given_up():
    once = project((failed_launch(failed_at=None), LaunchState()))
    assert [a.run_key for a in plan_next(once).actions] == ["explore:r0001:1"]
    given_up = plan_next(project((failed_launch(failures=4), LaunchState())))
    assert given_up.actions == ()
    assert given_up.failed is not None
    assert given_up.failed.startswith("r0001 explore failed 4 times, at last with: engine: gone")


def test_launches_that_succeeded_and_were_withdrawn_count_for_the_key_alone():
    again = project((LaunchState(failures=0, ended=2), LaunchState()))
    assert [a.run_key for a in plan_next(again).actions] == ["explore:r0001:2"]


def test_a_failure_that_a_retry_cannot_help_stops_at_once_with_its_cause():
    plan = plan_next(project((failed_launch(retryable=False, cause="the judge has no column x"), LaunchState())))
    assert plan.actions == ()
    assert plan.failed is not None
    assert "r0001 explore failed: the judge has no column x" in plan.failed
    assert "start it again (`rft run`, or tune() with this experiment_name)" in plan.failed
    assert plan.failed.endswith("a setting that decides results, set `name`, too, and use another RFT_HOME")


@pytest.mark.parametrize(
    ("failures", "passed", "said"),
    [(1, 0.0, "retry 1 of 3 in 3 s"), (2, 2.0, "retry 2 of 3 in 10 s"), (3, 47.5, "retry 3 of 3 in 1 s")],
)
def test_retries_wait_longer_each_time_and_are_reported(failures: int, passed: float, said: str):
    state = project((DONE, failed_launch(failures=failures, ended=failures)), now=100.0 + passed)
    plan = plan_next(state)
    assert plan.actions == ()
    assert f"r0001 sync: {said}: engine: gone" in plan.waiting
    assert plan.retry_in is not None
    later = plan_next(replace(state, now=state.now + plan.retry_in))
    assert [a.run_key for a in later.actions] == [f"sync:r0001:{failures}"]


@given(jump=st.floats(-1e7, 1e7), failures=st.integers(1, 3))
def test_a_clock_that_jumps_never_blocks_for_longer_than_twice_the_wait(jump: float, failures: int):
    wait = 3.0 * 4 ** (failures - 1)
    state = project((failed_launch(failures=failures), LaunchState()), now=100.0 + jump)
    plan = plan_next(state)
    assert plan.actions or (plan.retry_in is not None and plan.retry_in <= 2 * wait)


def test_each_mode_plans_only_its_half():
    assert launches(project((DONE, LaunchState()), mode="explore")) == [("explore", 2)]
    assert launches(project((DONE, LaunchState()), mode="train")) == [("sync", 1)]
    assert plan_next(project((DONE, DONE), mode="train")).finished


def test_two_halves_keep_the_order_of_one_driver():
    waits = LaunchState()
    assert plan_next(project((DONE, waits), mode="explore", other_half=True)).waiting == (
        "r0002 explores after r0001 is trained",
    )
    assert launches(project((DONE, DONE), mode="explore", other_half=True)) == [("explore", 2)]
    plan = plan_next(project((DONE, DONE), mode="train", other_half=True))
    assert not plan.finished and plan.waiting == ("r0002 trains when it is explored",)
    assert plan_next(project(*[(DONE, DONE)] * 3, mode="train", other_half=True)).finished
    assert plan_next(project(mode="train", other_half=True, warm_start=waits)).waiting == (
        "r0000 is made by the driver of mode explore",
    )


@given(offset=st.integers(0, 2), budget=st.integers(1, 6))
def test_acting_on_the_plan_always_finishes_within_the_offset(offset: int, budget: int):
    explored = synced = 0
    for _ in range(2 * budget):
        rounds = [
            (DONE if i < explored else LaunchState(), DONE if i < synced else LaunchState()) for i in range(explored)
        ]
        plan = plan_next(project(*rounds, rounds_budget=budget, offset_rounds=offset))
        assert plan.actions
        action = plan.actions[0]
        if action.kind == "explore":
            explored += 1
            assert explored == action.round
        else:
            synced += 1
            assert synced == action.round
        assert explored - synced <= offset + 1
    assert plan_next(project(*[(DONE, DONE)] * budget, rounds_budget=budget, offset_rounds=offset)).finished


def test_round_keys_round_trip_and_refuse_others():
    assert round_key(3) == "r0003"
    assert round_number("r0012") == 12
    with pytest.raises(ValueError, match="r0003"):
        round_number("12")


def test_the_command_names_rows_that_the_next_online_round_leaves_out():
    state = project(committed_rows=12, rows_above_share=30, experiences_needed=64)
    (line,) = plan_next(state).waiting[:1]
    assert line.startswith("r0001 collects rows when 64 are committed, 12 so far; 30 more are above the share of")
    assert "service.subject_share" in line
    assert launches(replace(state, committed_rows=64)) == [("collect", 1)]


def test_an_open_alert_pauses_an_online_project():
    alert = "invalid tool calls: 20.0%, the limit is 10.0% (service.alerts.invalid_rate)"
    state = project(committed_rows=64, experiences_needed=64, paused=alert)
    plan = plan_next(state)
    assert not plan.actions
    assert plan.waiting[0] == (
        f"r0001 collects no rows while an alert is open: {alert}; `rft models resume` continues the training"
    )
    collected = replace(state, rounds=project((DONE, LaunchState())).rounds)
    assert f"r0001 does not train while an alert is open: {alert}" in plan_next(collected).waiting[-1]
    assert launches(replace(collected, paused=None)) == [("sync", 1)]
    running = replace(state, rounds=project((DONE, RUNNING)).rounds)
    assert "r0001 sync is running" in plan_next(running).waiting
