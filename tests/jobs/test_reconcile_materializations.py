"""Phases that are complete on disk but that Dagster was not told of."""

import logging
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rft_platform.assets.checks import EVALUATION_CHECKS, EXPERIENCE_CHECKS
from rft_platform.common.errors import DamagedError
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.reconcile_materializations import reconcile_materializations
from rft_platform.object_store.mirror import open_mirror
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from tests.experience.samples import rollouts
from tests.support.records import result

#: Materializes an evaluation; Dagster has stored the check's result with the run, not yet among those of the check,
#: when the process is killed. argv: home.
KILLED_AFTER_THE_RUN_S_RECORD = """
import os, signal, sys
from pathlib import Path
import dagster as dg
from rft_platform.assets.checks import EVALUATION_CHECKS, evaluation_results
from rft_platform.config.home import Home
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.reporting.reward_audit import Finding

@dg.asset(partitions_def=PLAIN_NAMES.rounds, check_specs=EVALUATION_CHECKS)
def evaluation_report():
    audit = Finding("audit_held_out", True, "")
    return dg.MaterializeResult(check_results=evaluation_results(False, "no gain", None, audit))

with open_instance(Home(Path(sys.argv[1]))) as instance:
    storage, store = instance.event_log_storage, instance.event_log_storage.store_asset_check_event
    def killed(event, event_id):
        if event.dagster_event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            os.kill(os.getpid(), signal.SIGKILL)
        store(event, event_id)
    storage.store_asset_check_event = killed
    instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
    dg.materialize([evaluation_report], instance=instance, partition_key="r0001")
"""
UNGATED = RoundEvaluation("no champion")
JUDGED = Judged("exact_match@1", sound=True, mean_reward=0.25, rows=4)
REFUSED = RoundEvaluation("no gain", gate_passed=False, results=[result()])


def partitions(instance: dg.DagsterInstance, asset: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey(asset)))


def test_what_its_note_says_is_recorded_once(project: Project) -> None:
    write(project.store, 1, JUDGED)
    write(project.store, 1, replace(UNGATED, metrics={"sampled_pass": 0.5}, promoted=True))
    publish(project.store, Policy("f", 3, "weights", round=0))
    write(project.store, 0, UNGATED)
    phases = [("explore", 1), ("sync", 1), ("warm_start", 0)]
    with dg.DagsterInstance.ephemeral() as instance:
        said = reconcile_materializations(project, instance, phases)
        start = [f"{name} of r0000" for name in ("task_dataset", "eval_task_dataset", "warm_start_checkpoint")]
        assert said == [*start, "judged_experiences of r0001", "evaluation_report of r0001"]
        assert partitions(instance, "judged_experiences") == partitions(instance, "evaluation_report") == {"r0001"}
        event = instance.get_latest_materialization_event(dg.AssetKey("judged_experiences"))
        assert event is not None and event.asset_materialization is not None
        assert event.asset_materialization.metadata["mean_reward"].value == 0.25
        tags = event.asset_materialization.tags or {}
        assert tags["dagster/data_version"] == f"{project.store.digest(1)[:16]}+exact_match@1"
        warm = instance.get_latest_materialization_event(dg.AssetKey("warm_start_checkpoint"))
        assert warm is not None and warm.asset_materialization is not None
        assert (warm.asset_materialization.tags or {})["dagster/data_version"] == "weights"
        assert reconcile_materializations(project, instance, phases) == []


def check_results(instance: dg.DagsterInstance, spec: dg.AssetCheckSpec) -> list[tuple[bool, int]]:
    records = instance.event_log_storage.get_asset_check_execution_history(spec.key, limit=10)
    events = [record.event.dagster_event for record in records if record.event is not None]
    found = [event.asset_check_evaluation_data for event in events if event is not None]
    return [(each.passed, each.metadata["round"].value) for each in found]


def test_asset_checks_of_reconciled_materializations_are_recorded(project: Project) -> None:
    write(project.store, 1, JUDGED)
    write(project.store, 1, REFUSED)
    write(project.store, 2, replace(REFUSED, results=[], gate_passed=None))
    with dg.DagsterInstance.ephemeral() as instance:
        reconcile_materializations(project, instance, [("explore", 1), ("sync", 1), ("sync", 2)])
        assert [len(check_results(instance, spec)) for spec in EXPERIENCE_CHECKS] == [1] * len(EXPERIENCE_CHECKS)
        assert check_results(instance, EVALUATION_CHECKS[0]) == [(True, 2), (False, 1)]


def test_an_asset_whose_run_was_killed_before_its_checks_is_recorded_with_them(project: Project) -> None:
    write(project.store, 1, JUDGED)

    @dg.asset(partitions_def=PLAIN_NAMES.rounds, check_specs=[dg.AssetCheckSpec("fine", asset="another")])
    def another() -> dg.MaterializeResult:
        """An asset of the same run whose check is recorded."""
        return dg.MaterializeResult(check_results=[dg.AssetCheckResult(check_name="fine", passed=True)])

    @dg.asset(partitions_def=PLAIN_NAMES.rounds)
    def judged_experiences() -> None:
        """The materialisation is recorded; the checks are not."""

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
        dg.materialize([another, judged_experiences], instance=instance, partition_key="r0001")
        assert reconcile_materializations(project, instance, [("explore", 1)]) == ["judged_experiences of r0001"]
        assert [len(check_results(instance, spec)) for spec in EXPERIENCE_CHECKS] == [1] * len(EXPERIENCE_CHECKS)
        assert reconcile_materializations(project, instance, [("explore", 1)]) == []


def test_a_run_that_has_not_ended_reports_its_checks_itself(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a backfill that judges the round again: its results follow its materialization."""
    write(project.store, 1, JUDGED)

    @dg.asset(partitions_def=PLAIN_NAMES.rounds)
    def judged_experiences() -> None:
        """The materialisation is recorded; the checks are not yet."""

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
        run_id = dg.materialize([judged_experiences], instance=instance, partition_key="r0001").run_id
        ended = instance.get_run_by_id(run_id)
        assert ended is not None
        with monkeypatch.context() as running:
            started = ended.with_status(dg.DagsterRunStatus.STARTED)
            running.setattr(instance, "get_run_by_id", lambda _: started)
            assert reconcile_materializations(project, instance, [("explore", 1)]) == []
        assert reconcile_materializations(project, instance, [("explore", 1)]) == ["judged_experiences of r0001"]


def test_one_recorded_check_of_several_is_not_all(project: Project) -> None:
    write(project.store, 1, JUDGED)
    known, *missing = EXPERIENCE_CHECKS

    @dg.asset(partitions_def=PLAIN_NAMES.rounds, check_specs=[known])
    def judged_experiences() -> dg.MaterializeResult:
        """The first check is recorded; the process was killed before the others."""
        return dg.MaterializeResult(
            check_results=[dg.AssetCheckResult(check_name=known.name, passed=True, metadata={"round": 1})]
        )

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
        dg.materialize([judged_experiences], instance=instance, partition_key="r0001")
        assert reconcile_materializations(project, instance, [("explore", 1)]) == ["judged_experiences of r0001"]
        assert [len(check_results(instance, spec)) for spec in missing] == [1] * len(missing)
        assert reconcile_materializations(project, instance, [("explore", 1)]) == []


@pytest.mark.slow
def test_a_result_of_a_killed_run_is_recorded_for_its_asset_check(project: Project) -> None:
    write(project.store, 1, REFUSED)
    command = [sys.executable, "-c", KILLED_AFTER_THE_RUN_S_RECORD, str(project.home.root)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    with open_instance(project.home) as instance:
        (run,) = instance.get_runs()
        known = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        assert (len(known), partitions(instance, "evaluation_report")) == (1, {"r0001"})
        instance.report_run_failed(run)  # as the health check of a run does, or the end of a driver's orphaned runs
        assert reconcile_materializations(project, instance, [("sync", 1)]) == ["evaluation_report of r0001"]
        records = instance.event_log_storage.get_asset_check_execution_history(EVALUATION_CHECKS[0].key, limit=1)
        assert records[0].event is not None and records[0].event.dagster_event is not None
        result = records[0].event.dagster_event.asset_check_evaluation_data
        assert (result.passed, result.metadata["round"].value) == (False, 1)
        assert reconcile_materializations(project, instance, [("sync", 1)]) == []


def test_a_kill_between_the_reports_loses_no_check_result(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project.store, 1, JUDGED)
    with dg.DagsterInstance.ephemeral() as instance:
        report, said = instance.report_runless_asset_event, []

        def killed_after_two(event: Any) -> None:
            if len(said) == 2:
                raise KeyboardInterrupt
            said.append(event)
            report(event)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(instance, "report_runless_asset_event", killed_after_two)
            reconcile_materializations(project, instance, [("explore", 1)])
        assert reconcile_materializations(project, instance, [("explore", 1)]) == ["judged_experiences of r0001"]
        assert all(check_results(instance, spec) for spec in EXPERIENCE_CHECKS)


def test_damaged_rows_are_left_for_later_with_what_follows_from_them(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(project.store, 1, JUDGED)
    write(project.store, 1, UNGATED)
    write(project.store, 2, UNGATED)

    def damaged(*_: object) -> None:
        raise DamagedError("r0001: a file differs from its digest")

    phases = [("explore", 1), ("sync", 1)]
    with dg.DagsterInstance.ephemeral() as instance:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr("rft_platform.rounds.judge.quality", damaged)
            assert reconcile_materializations(project, instance, phases) == ["evaluation_report of r0002"]
        assert "r0001: a file differs from its digest" in caplog.text
        assert partitions(instance, "judged_experiences") == set()
        both = ["judged_experiences of r0001", "evaluation_report of r0001"]
        assert reconcile_materializations(project, instance, phases) == both
        assert [len(check_results(instance, spec)) for spec in EXPERIENCE_CHECKS] == [1] * len(EXPERIENCE_CHECKS)


def test_a_round_of_a_running_launch_is_left_to_its_run(project: Project) -> None:
    for number in (1, 2):
        write(project.store, number, UNGATED)
    with dg.DagsterInstance.ephemeral() as instance:
        reported = reconcile_materializations(project, instance, running={("sync", 2)})
        assert reported == ["evaluation_report of r0001"]
        assert reconcile_materializations(project, instance) == ["evaluation_report of r0002"]


def test_a_call_reports_at_least_one_asset_and_the_next_call_continues(project: Project) -> None:
    for number in (1, 2):
        write(project.store, number, UNGATED)
    with dg.DagsterInstance.ephemeral() as instance:
        calls = [reconcile_materializations(project, instance, within_s=0.0) for _ in range(3)]
        assert calls == [["evaluation_report of r0001"], ["evaluation_report of r0002"], []]


def test_rows_that_another_home_stored_are_not_fetched_for_their_checks(project: Project, tmp_path: Path) -> None:
    url, second = f"file://{tmp_path}/bucket/project", tmp_path / "second"
    open_mirror(project.home.root, url).take_over()
    project.store.write_rollouts(1, 0, rollouts(round=1))
    write(project.store, 1, JUDGED)
    second.mkdir()
    open_mirror(second, url).take_over()
    taken = Project.open(Home(second))
    for opened, reported in ((taken, 4), (project, len(EXPERIENCE_CHECKS))):
        with dg.DagsterInstance.ephemeral() as instance:
            assert reconcile_materializations(opened, instance) == ["judged_experiences of r0001"]
            assert sum(len(check_results(instance, spec)) for spec in EXPERIENCE_CHECKS) == reported
    assert not taken.store.rollout_files(1)[0].exists() and taken.store.is_stored(taken.store.rollout_files(1)[0])


def test_what_is_not_complete_or_known_is_left_alone(project: Project) -> None:
    write(project.store, 2, replace(JUDGED, sound=False))
    write(project.store, 3, JUDGED)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetMaterialization("judged_experiences", partition=round_key(3), metadata={"by": "its own run"})
        )
        assert (
            reconcile_materializations(project, instance, [("explore", 1), ("explore", 2), ("explore", 3), ("sync", 3)])
            == []
        )
        assert partitions(instance, "judged_experiences") == {"r0003"}
