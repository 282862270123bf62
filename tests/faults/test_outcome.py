"""How a fault ends a Dagster run: description, metadata and tags, alike for every launcher."""

import dagster as dg
import pytest

from rft_platform.assets.run_failure import reports_faults
from rft_platform.common.errors import EngineError, UserError
from rft_platform.jobs.launches import launches
from rft_platform.jobs.run_error import run_error


def run(body, check_specs=()) -> tuple[dg.DagsterRun, list[dg.DagsterEvent], Exception | None]:
    """Execute one asset under the name of a job of the plan; its run, its failures, and what reached the caller."""
    made = dg.asset(name="thing", check_specs=list(check_specs))(reports_faults(body))
    job = dg.Definitions(assets=[made], jobs=[dg.define_asset_job("warm_start_job", ["thing"])]).resolve_job_def(
        "warm_start_job"
    )
    raised = None
    with dg.DagsterInstance.ephemeral() as instance:
        try:
            job.execute_in_process(instance=instance)
        except Exception as error:
            raised = error
        (found,) = instance.get_runs()
        failures = [
            record.dagster_event
            for record in instance.all_logs(found.run_id)
            if record.dagster_event and record.dagster_event.is_step_failure
        ]
        known = launches(instance)
    assert known.failures[("warm_start", 0)].cause == found.tags["rft/cause"]
    assert known.failures[("warm_start", 0)].retryable == (found.tags["rft/retryable"] == "true")
    return found, failures, raised


@pytest.mark.parametrize(
    ("error", "tags"),
    [
        (EngineError("the engine at 1 does not answer"), {"rft/fault": "engine", "rft/retryable": "true"}),
        (UserError("model folder x: no such folder"), {"rft/fault": "user_input", "rft/retryable": "false"}),
    ],
)
def test_a_known_error_is_a_one_line_failure_with_tags(error, tags):
    def thing(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        raise error

    found, (event,), raised = run(thing)
    assert found.status is dg.DagsterRunStatus.FAILURE
    assert {name: found.tags[name] for name in tags} == tags
    assert found.tags["rft/cause"] == str(error)
    failure = event.step_failure_data.user_failure_data
    assert failure.description == f"{error.fault}: {error}"
    assert failure.metadata["retryable"].value == error.retryable
    assert failure.metadata["hint"].value == error.hint
    assert raised.allow_retries == error.retryable
    assert run_error(raised) is error  # the in-process driver is told the very same


def test_a_bug_in_user_code_is_reported_with_file_and_line():
    def thing(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"share": 1 / len([])})

    found, (event,), raised = run(thing)
    assert (found.tags["rft/fault"], found.tags["rft/retryable"]) == ("user_code", "false")
    assert f"{__file__}:" in found.tags["rft/cause"]
    assert "ZeroDivisionError" in event.step_failure_data.user_failure_data.description
    assert run_error(raised).fault == "user_code"


def test_a_blocking_check_is_an_outcome_that_no_retry_changes():
    def thing(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        refused = dg.AssetCheckResult(check_name="sound", passed=False, severity=dg.AssetCheckSeverity.ERROR)
        return dg.MaterializeResult(check_results=[refused])

    found, _, raised = run(thing, [dg.AssetCheckSpec("sound", asset="thing", blocking=True)])
    assert found.status is dg.DagsterRunStatus.FAILURE
    assert (found.tags["rft/fault"], found.tags["rft/retryable"]) == ("user_code", "false")
    assert "sound" in found.tags["rft/cause"]
    assert not run_error(raised).retryable
