"""Partitions of rounds: a mistyped one concerns no round, and the next round's is there before it is typed."""

import dagster as dg
import pytest

from rft_platform.assets.common import round_of
from rft_platform.assets.run_failure import CAUSE_TAG, FAULT_TAG, RETRYABLE_TAG, reports_faults
from rft_platform.definitions import defs
from rft_platform.experience.file_names import is_round_key, round_key, round_number
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.jobs import add_rounds, asset_jobs
from rft_platform.jobs.launches import launches
from rft_platform.jobs.sensors import next_round_sensor
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from rft_platform.run.machine import partition_findings

ROUNDS = str(PLAIN_NAMES.rounds.name)
MISTYPED = ("foo", "8", "r9", "r00001", "r²²²²", "R0001", "r0001 ")


def start_done(project: Project) -> None:
    publish(project.store, Policy(folder="f", policy_version=0, weights_digest="d", round=0))
    write(project.store, 0, RoundEvaluation())


def failed_run(instance: dg.DagsterInstance, partition: str) -> None:
    job = defs.resolve_job_def("explore_job")
    run = instance.create_run_for_job(job, tags={"dagster/partition": partition})
    instance.report_run_failed(run, "no such round")


def test_round_keys_are_written_in_one_way() -> None:
    assert not any(map(is_round_key, MISTYPED))
    for number in (0, 1, 9999, 10000):
        assert round_number(round_key(number)) == number
    with pytest.raises(ValueError, match="r followed by at least four digits"):
        round_number("r9")


@pytest.mark.parametrize("partition", [*MISTYPED, "r9999", "r99999999"])
def test_the_plan_ignores_runs_of_mistyped_partitions(project: Project, partition: str) -> None:
    start_done(project)
    with dg.DagsterInstance.ephemeral() as instance:
        failed_run(instance, partition)
        state = observe(project, launches(instance))
        assert len(state.rounds) <= 1
        assert [action.run_key for action in plan_next(state).actions] == ["explore:r0001:0"]
        context = dg.build_sensor_context(
            instance=instance, resources={"project": ProjectResource(home=str(project.home.root))}
        )
        assert next_round_sensor(PLAIN_NAMES, asset_jobs(PLAIN_NAMES))(context).run_requests


def test_the_next_round_has_its_partition(project: Project) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        add_rounds(instance, project)
        add_rounds(instance, project)
        assert instance.get_dynamic_partitions(ROUNDS) == ["r0001"]
        write(project.store, 1, Judged(sound=True))
        add_rounds(instance, project)
        assert instance.get_dynamic_partitions(ROUNDS) == ["r0001", "r0002"]


def test_rounds_that_another_instance_made_have_their_partitions_and_none_follows_the_budget(project: Project) -> None:
    for number in (1, 2):
        write(project.store, number, Judged(sound=True))
    with dg.DagsterInstance.ephemeral() as instance:
        add_rounds(instance, project)
        assert instance.get_dynamic_partitions(ROUNDS) == ["r0001", "r0002"], "the budget is two rounds"


def test_a_run_of_a_mistyped_partition_is_the_users_and_names_the_rounds_there_are() -> None:
    @dg.asset(partitions_def=PLAIN_NAMES.rounds)
    @reports_faults
    def phase(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"round": round_of(context)})

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(ROUNDS, ["r10000", "r9999", "foo"])
        assert dg.materialize([phase], instance=instance, partition_key="r9999").success
        result = dg.materialize([phase], instance=instance, partition_key="foo", raise_on_error=False)
        run = instance.get_run_by_id(result.run_id)
        without = dg.materialize([phase], instance=instance, raise_on_error=False)
        unpartitioned = instance.get_run_by_id(without.run_id)
    assert not result.success and not without.success
    assert run is not None and unpartitioned is not None
    assert (run.tags[FAULT_TAG], run.tags[RETRYABLE_TAG]) == ("user_input", "false")
    assert (unpartitioned.tags[FAULT_TAG], unpartitioned.tags[RETRYABLE_TAG]) == ("user_input", "false")
    assert "choose one, such as r0001" in unpartitioned.tags[CAUSE_TAG]
    assert "partition 'foo' is not a round" in run.tags[CAUSE_TAG]
    assert "r9999 to r10000" in run.tags[CAUSE_TAG]


@pytest.mark.slow
def test_doctor_names_mistyped_partitions(project: Project) -> None:
    assert list(partition_findings(project.home)) == []
    with open_instance(project.home) as instance:
        instance.add_dynamic_partitions(ROUNDS, ["r0001"])
        assert list(partition_findings(project.home)) == []
        instance.add_dynamic_partitions(ROUNDS, ["foo", "8"])
    (finding,) = partition_findings(project.home)
    assert finding.level == "warning"
    assert "foo, 8" in finding.text
