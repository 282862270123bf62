"""Pruning of Dagster's run history: logs of old rounds go, what the interface and the plan need stays."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.launches import launches
from rft_platform.jobs.maintenance import Pruned, prune_run_history

ROUNDS = 6


@dg.asset(partitions_def=dg.DynamicPartitionsDefinition(name="rft_round"))
def judged_experiences(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    print("captured")
    if "fail" in context.run.tags:
        raise ValueError("on purpose")
    return dg.MaterializeResult(metadata={"mean_reward": 0.5})


explore_job = dg.define_asset_job("explore_job", [judged_experiences])
DEFS = dg.Definitions([judged_experiences], jobs=[explore_job])


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with open_instance(Home(tmp_path / "home")) as instance:
        yield instance


def launch(instance: dg.DagsterInstance, number: int, **tags: str) -> str:
    instance.add_dynamic_partitions("rft_round", [round_key(number)])
    job = DEFS.resolve_job_def("explore_job")
    done = job.execute_in_process(instance=instance, partition_key=round_key(number), tags=tags, raise_on_error=False)
    return done.run_id


@pytest.mark.slow
def test_old_rounds_lose_their_logs_and_keep_what_the_interface_and_the_plan_need(instance):
    failed = launch(instance, 1, fail="yes")
    runs = {number: launch(instance, number) for number in range(1, ROUNDS + 1)}
    last_failed = launch(instance, 1000, fail="yes")  # a mistyped partition
    other = DEFS.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, partition_key=round_key(1)
    )
    logs = Path(instance.root_directory) / "history" / "runs"
    before = launches(instance)

    planned = prune_run_history(instance, keep_rounds=2, dry_run=True)
    assert len(list(logs.glob("*.db"))) == ROUNDS + 4  # and the index

    pruned = prune_run_history(instance, keep_rounds=2, dry_run=False)
    assert pruned == planned
    assert (pruned.runs, pruned.event_logs) == (1, 4)  # the failed run of r0001; r0001 to r0004
    assert pruned.freed_bytes > 100_000
    left = {path.stem for path in logs.glob("*.db")} - {"index"}
    assert left == {runs[5], runs[6], last_failed, other.run_id}
    captured = Path(instance.root_directory) / "storage"
    assert not (captured / runs[1]).exists()
    assert (captured / runs[6]).exists()

    assert not instance.has_run(failed)
    assert all(instance.has_run(run) for run in runs.values())
    expected = {round_key(number) for number in runs}
    assert instance.get_materialized_partitions(judged_experiences.key) == expected
    event = instance.get_latest_data_version_record(judged_experiences.key, partition_key=round_key(1))
    assert event is not None
    assert event.asset_materialization.metadata["mean_reward"].value == 0.5
    after = launches(instance)
    assert after.failures == before.failures  # of the round that does not exist
    assert prune_run_history(instance, keep_rounds=2, dry_run=False) == Pruned()


def test_an_open_run_is_left_alone(instance):
    launch(instance, 9)
    run = instance.add_run(
        dg.DagsterRun(
            job_name="explore_job", status=dg.DagsterRunStatus.STARTED, tags={"dagster/partition": round_key(1)}
        )
    )
    prune_run_history(instance, keep_rounds=1, dry_run=False)
    assert instance.has_run(run.run_id)
