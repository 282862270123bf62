"""What the plan learns of launches: failures since the last success, and a run key that was never used."""

from collections.abc import Callable
from datetime import UTC, datetime

import dagster as dg
import pytest

from rft_platform.assets.run_failure import CAUSE_TAG, RETRYABLE_TAG, fault_tags
from rft_platform.common.errors import PrerequisiteError
from rft_platform.definitions import defs
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.launches import launches
from rft_platform.jobs.maintenance import prune_run_history
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import observe
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from rft_platform.rounds.round import Round

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
FAILED, CANCELED, SUCCESS = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS

EVENTS = {
    FAILED: dg.DagsterEventType.RUN_FAILURE,
    CANCELED: dg.DagsterEventType.RUN_CANCELED,
    SUCCESS: dg.DagsterEventType.RUN_SUCCESS,
}


def add_run(instance: dg.DagsterInstance, job: str, status: dg.DagsterRunStatus, number: int = 1, **tags: str) -> None:
    """A run of round ``number`` that has ended ``NOW``."""
    run = instance.create_run_for_job(defs.resolve_job_def(job), tags={"dagster/partition": round_key(number), **tags})
    event = dg.DagsterEvent(event_type_value=EVENTS[status].value, job_name=job)
    instance.run_storage.handle_run_event(run.run_id, event, update_timestamp=NOW)


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def test_cancelled_and_failed_runs_use_up_their_run_key(instance):
    add_run(instance, "explore_job", CANCELED)
    add_run(instance, "explore_job", FAILED)
    known = launches(instance)
    assert known.failures[("explore", 1)].count == 2
    assert known.ended[("explore", 1)] == 2
    assert known.failures[("explore", 1)].retryable  # nothing said otherwise: a process that died, say


def test_the_newest_failure_has_the_cause_and_whether_to_retry(instance):
    add_run(instance, "sync_round_job", FAILED, **{CAUSE_TAG: "old", RETRYABLE_TAG: "true"})
    add_run(instance, "sync_round_job", FAILED, **{CAUSE_TAG: "the disk is full", RETRYABLE_TAG: "false"})
    failed = launches(instance).failures[("sync", 1)]
    assert (failed.cause, failed.retryable) == ("the disk is full", False)
    assert failed.ended_at == NOW.timestamp()


def test_a_success_ends_the_count_of_failures_but_not_of_run_keys(instance):
    add_run(instance, "sync_round_job", FAILED)
    add_run(instance, "sync_round_job", SUCCESS)
    known = launches(instance)
    assert ("sync", 1) not in known.failures
    assert known.ended[("sync", 1)] == 2


def test_a_phase_whose_result_was_withdrawn_is_launched_under_a_new_key(instance, project):
    publish(project.store, Policy("f", 0, "d", 0))
    write(project.store, 0, RoundEvaluation())
    add_run(instance, "explore_job", SUCCESS)  # and then its judgement was set aside
    plan = plan_next(observe(project, launches(instance)))
    assert [action.run_key for action in plan.actions] == ["explore:r0001:1"]


def test_pruned_runs_have_used_up_their_run_keys(instance):
    """A failure that a success followed is deleted; a later one counts, and stays."""
    for attempt, status in enumerate((FAILED, SUCCESS, FAILED)):
        add_run(instance, "evaluate_job", status, **{"dagster/run_key": f"evaluate:r0001:{attempt}"})
    add_run(instance, "evaluate_job", SUCCESS, 9)
    before = launches(instance)
    assert prune_run_history(instance, keep_rounds=1, dry_run=False).runs == 1
    after = launches(instance)
    assert (after.ended, after.failures) == (before.ended, before.failures)
    assert after.ended[("evaluate", 1)] == 3 and after.failures[("evaluate", 1)].count == 1


@pytest.mark.slow
def test_far_ahead_explorations_do_not_hide_that_a_run_key_was_used(instance):
    for number in range(1, 22):
        add_run(instance, "explore_job", SUCCESS, number)
    assert launches(instance, offset_rounds=20).ended[("explore", 1)] == 1


def test_later_evaluations_do_not_hide_those_of_an_earlier_round(instance):
    add_run(instance, "evaluate_job", FAILED, 0)
    for number in range(18):
        tags = {"dagster/partition": round_key(number)}
        instance.add_run(dg.DagsterRun(job_name="evaluate_job", status=SUCCESS, tags=tags))
    known = launches(instance)
    assert known.ended[("evaluate", 0)] == 2, "the next launch needs a run key that was never used"
    assert ("evaluate", 0) not in known.failures


def test_under_the_daemon_a_failure_that_no_retry_helps_stops_the_plan_with_its_cause(instance, project):
    publish(project.store, Policy("f", 0, "d", 0))
    write(project.store, 0, RoundEvaluation())
    add_run(instance, "explore_job", FAILED, **{CAUSE_TAG: "no column x", RETRYABLE_TAG: "false"})
    plan = plan_next(observe(project, launches(instance)))
    assert not plan.actions
    assert "no column x" in plan.failed


def test_a_launch_that_came_too_early_does_not_stop_the_plan(instance, project):
    def failed_too_early(job: str, stage: Callable[[], object]) -> None:
        with pytest.raises(PrerequisiteError) as early:
            stage()
        tags = fault_tags(early.value, "")
        add_run(instance, job, FAILED, **{name: tags[name] for name in (CAUSE_TAG, RETRYABLE_TAG)})

    def planned() -> list[str]:
        return [action.run_key for action in plan_next(observe(project, launches(instance))).actions]

    failed_too_early("explore_job", Round(project, 1).snapshot)
    assert planned() == ["warm_start:r0000:0"]
    publish(project.store, Policy("f", 0, "d", 0))
    write(project.store, 0, RoundEvaluation())
    assert planned() == ["explore:r0001:1"]
    failed_too_early("explore_job", Round(project, 1).judge)
    failed_too_early("sync_round_job", lambda: Round(project, 1).train(None, None))
    assert planned() == ["explore:r0001:2"]
    write(project.store, 1, Judged(sound=True))
    assert planned() == ["sync:r0001:1"]


def test_between_retries_the_plan_waits_from_the_end_of_the_failed_run(instance, project, monkeypatch):
    monkeypatch.setenv("RFT_RETRY_DELAY_S", "10")
    publish(project.store, Policy("f", 0, "d", 0))
    write(project.store, 0, RoundEvaluation())
    add_run(instance, "explore_job", FAILED, **{CAUSE_TAG: "engine gone", RETRYABLE_TAG: "true"})
    ended = NOW.timestamp()
    plan = plan_next(observe(project, launches(instance), now=ended + 4))
    assert plan.waiting[0] == "r0001 explore: retry 1 of 3 in 6 s: engine gone"
    later = plan_next(observe(project, launches(instance), now=ended + 11))
    assert [action.run_key for action in later.actions] == ["explore:r0001:1"]
