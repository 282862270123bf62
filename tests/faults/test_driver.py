"""The in-process driver waits between retries, stops where none can help, and counts anew when called again."""

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import dagster as dg
import pytest

from rft_platform.assets.checks import EVALUATION_CHECKS
from rft_platform.assets.run_failure import reports_faults
from rft_platform.common.errors import EngineError, RegistryError, RftError, TransientError, UserError
from rft_platform.jobs.driver_lock import config_lock, driver_lock
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.launches import launches
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.planning.project_state import Launches
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from rft_platform.run import driver
from rft_platform.run.driver import DriveResult, drive
from rft_platform.run.start import write_config


@pytest.fixture
def drive_with(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DriveResult]:
    """Drive explorations that end with the given errors, one after the other; None is one that succeeds."""
    monkeypatch.setenv("RFT_HOME", str(project.home.root))
    monkeypatch.setenv("RFT_RETRY_DELAY_S", "0.1")
    publish(project.store, Policy("base", 0, "d0", 0))
    write(project.store, 0, RoundEvaluation())

    def run(*outcomes: RftError | None) -> DriveResult:
        left = list(outcomes)

        @dg.asset(partitions_def=PLAIN_NAMES.rounds)
        @reports_faults
        def exploration(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
            outcome = left.pop(0)
            if outcome is not None:
                raise outcome
            write(project.store, 1, Judged(sound=True))
            return dg.MaterializeResult()

        job = dg.define_asset_job("explore_job", ["exploration"])
        result = drive(project, dg.Definitions(assets=[exploration], jobs=[job]), max_launches=len(outcomes))
        assert not left or result.failed
        return result

    return run


@pytest.mark.slow
def test_a_retryable_failure_is_repeated_after_a_wait_that_is_logged(drive_with, caplog, monkeypatch):
    monkeypatch.setenv("RFT_RETRY_DELAY_S", "2")  # a busy machine needs less time to plan the retry
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="rft_platform.run.driver"):
        result = drive_with(EngineError("the engine is gone"), EngineError("gone again"), None)
    assert [launched.error is None for launched in result.launched] == [False, False, True]
    assert time.monotonic() - started >= 2 + 8
    assert result.failed is None
    lines = [record.getMessage() for record in caplog.records if record.name == "rft_platform.run.driver"]
    assert [re.sub(r"in \d s", "in N s", line) for line in lines] == [
        "r0001 explore: retry 1 of 3 in N s: the engine is gone",
        "r0001 explore: retry 2 of 3 in N s: gone again",
    ]


@pytest.mark.slow
def test_a_lost_connection_to_dagsters_database_after_a_failure_does_not_end_the_drive(drive_with, monkeypatch):
    calls: list[int] = []

    def loses_the_second(instance: dg.DagsterInstance) -> Launches:
        calls.append(1)
        if len(calls) == 2:  # the first is at the start of the drive
            raise ConnectionResetError("server closed the connection").with_traceback(None)
        return launches(instance)

    monkeypatch.setattr(driver, "launches", loses_the_second)
    monkeypatch.setattr(driver, "as_fault", lambda error: TransientError(str(error)))  # the test is user code
    monkeypatch.setattr(driver, "_DATABASE_WAITS_S", (0.01,))
    result = drive_with(EngineError("the engine is gone"), None)
    assert [launched.error is None for launched in result.launched] == [False, True]
    assert len(calls) == 3 and result.failed is None


@pytest.mark.slow
def test_four_failures_in_a_row_end_the_drive(drive_with):
    result = drive_with(*[EngineError(f"gone {attempt}") for attempt in range(4)], None)
    assert len(result.launched) == 4
    assert "r0001 explore failed 4 times, at last with: gone 3" in str(result.failed)


@pytest.mark.slow
def test_a_permanent_failure_ends_the_drive_and_the_next_drive_continues(drive_with):
    result = drive_with(UserError("no column 'question'"), None)
    assert len(result.launched) == 1
    assert "r0001 explore failed: no column 'question'" in str(result.failed)
    assert isinstance(result.error, UserError)
    again = drive_with(None)
    assert again.failed is None
    assert again.launched[0].error is None


@pytest.mark.slow
def test_a_launch_that_fails_after_its_last_note_has_its_result_in_dagster(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_HOME", str(project.home.root))
    publish(project.store, Policy("base", 0, "d0", 0))
    write(project.store, 0, RoundEvaluation())
    write(project.store, 1, Judged(sound=True, judge_version="exact_match@1"))
    refused = RoundEvaluation(gate="no gain", gate_passed=False)

    @dg.asset(partitions_def=PLAIN_NAMES.rounds, check_specs=EVALUATION_CHECKS)
    @reports_faults
    def evaluation_report(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        write(project.store, 1, refused)
        raise RegistryError("MLflow does not answer")

    job = dg.define_asset_job("sync_round_job", [evaluation_report])
    result = drive(project, dg.Definitions(assets=[evaluation_report], jobs=[job]), max_launches=1)
    assert isinstance(result.error, RegistryError)
    with open_instance(project.home) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("evaluation_report")) == {"r0001"}
        history = instance.event_log_storage.get_asset_check_execution_history(EVALUATION_CHECKS[0].key, limit=1)
        assert history[0].event is not None and history[0].event.dagster_event is not None
        assert not history[0].event.dagster_event.asset_check_evaluation_data.passed


def test_a_driver_does_not_start_with_the_configuration_of_another_command(project: Project) -> None:
    write_config(project.home, project.config.model_copy(update={"seed": 7}))
    with pytest.raises(UserError, match="another command has written other values of seed since"):
        drive(project, dg.Definitions(), max_launches=0)
    for_one_half = project.in_mode("train").config
    write_config(project.home, for_one_half)  # its mode alone is no other configuration
    assert drive(project, dg.Definitions(), max_launches=0).failed is None


def test_a_command_that_waits_to_write_its_configuration_is_refused_once_a_driver_runs(project: Project) -> None:
    other, before = project.config.model_copy(update={"seed": 7}), project.home.config_file.read_text()
    with ThreadPoolExecutor(1) as pool, ExitStack() as driver_starts:
        with config_lock(project.home):
            late = pool.submit(write_config, project.home, other)
            time.sleep(0.1)
            driver_starts.enter_context(driver_lock(project.home))
        with pytest.raises(UserError, match="is driving"):
            late.result(timeout=10)
    assert project.home.config_file.read_text() == before
