"""The code of docs/dagster.md on rounds that were trained: an asset, a schedule, an alert and a sensor."""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import dagster as dg
import pyarrow as pa
import pytest

import rft_platform
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import DagsterNames
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated"),  # Dagster's own use of it
]

PAGE = Path(__file__).parents[2] / "docs" / "dagster.md"
HELPER = DagsterNames.of("helper")


@pytest.fixture(scope="module")
def shop() -> Iterator[ModuleType]:
    """The module that the page shows."""
    (code,) = re.findall(r'```python title="[^"]*"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = sys.modules["shop_rewards"] = ModuleType("shop_rewards")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    yield module
    del sys.modules["shop_rewards"]


@pytest.fixture(scope="module")
def definitions(finished, shop: ModuleType) -> dg.Definitions:
    """The project under the prefix of the page, and the definitions of the page."""
    config = Project.open(Home(finished.home)).config
    project = definitions_of(config, HELPER, ProjectResource(home=str(finished.home)))
    own = dg.Definitions(
        assets=[shop.rewards_by_task, shop.pass_rates],
        jobs=[shop.summary_job],
        schedules=[shop.every_monday],
        sensors=[shop.new_champion, shop.failed_run],
    )
    return dg.Definitions.merge(project, own)


@pytest.fixture(scope="module")
def instance(finished, definitions: dg.Definitions) -> Iterator[dg.DagsterInstance]:
    """An instance that knows the rounds from a tick of the project's sensor."""
    sensor = definitions.get_repository_def().get_sensor_def("helper__next_round_sensor")
    with dg.DagsterInstance.ephemeral() as made:
        resources = {"helper__project": ProjectResource(home=str(finished.home))}
        sensor(dg.build_sensor_context(instance=made, resources=resources))
        yield made


def metadata_of(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, object]:
    (made,) = result.asset_materializations_for_node(asset)
    return {name: value.value for name, value in made.metadata.items()}


def materialized(definitions: dg.Definitions, instance: dg.DagsterInstance, asset: str, partition: str | None = None):
    job = dg.define_asset_job(f"make_{asset}", selection=[asset])
    with_job = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    return with_job.resolve_job_def(job.name).execute_in_process(instance=instance, partition_key=partition)


def test_an_asset_of_a_round_gets_the_rows_of_that_round(finished, definitions, instance):
    frame = rft_platform.load_round(finished.home, 2)
    assert len(frame) == 32 and set(frame["round"]) == {2}
    shown = metadata_of(materialized(definitions, instance, "rewards_by_task", "r0002"), "rewards_by_task")
    assert shown["tasks"] == frame["task_id"].nunique() == 8


def test_an_asset_without_partitions_gets_all_rounds(finished, definitions, instance):
    shown = metadata_of(materialized(definitions, instance, "pass_rates"), "pass_rates")
    rates = [finished.note(number, "evaluation")["metrics"]["sampled_pass"] for number in (1, 2)]
    assert shown == {"best": max(rates), "rounds": 2}


def test_arrow_is_loaded_too_and_another_type_is_refused(definitions, instance):
    judged = dg.AssetIn(["helper", "judged_experiences"])

    @dg.asset(partitions_def=HELPER.rounds, ins={"judged": judged})
    def counted(judged: pa.Table) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"rows": judged.num_rows})

    @dg.asset(partitions_def=HELPER.rounds, ins={"judged": judged})
    def refused(judged: dict) -> None: ...

    own = dg.Definitions.merge(definitions, dg.Definitions(assets=[counted, refused]))
    assert metadata_of(materialized(own, instance, "counted", "r0001"), "counted") == {"rows": 32}
    with pytest.raises(UserError, match=r"annotated builtins.dict; expected pandas.DataFrame or pyarrow.Table"):
        materialized(own, instance, "refused", "r0001")


def test_the_schedule_and_the_sensor_of_the_page_request_their_runs(finished, definitions, instance):
    repository = definitions.get_repository_def()
    schedule = repository.get_schedule_def("every_monday")
    assert schedule.evaluate_tick(dg.build_schedule_context(instance=instance)).run_requests
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        tick = repository.get_sensor_def("new_champion").evaluate_tick(context)
    promoted = finished.note(2, "evaluation")["promoted"]
    assert bool(tick.run_requests) == promoted
    assert promoted or tick.skip_message == "the newest evaluation promoted nothing"


def test_the_alert_of_the_page_names_the_cause(definitions, instance, shop, caplog):
    run = instance.create_run_for_job(
        definitions.resolve_job_def("helper__explore_job"), tags={"rft/round": "r0009", "rft/cause": "the disk is full"}
    )
    instance.report_run_failed(run, "failed")
    failed = instance.get_run_by_id(run.run_id)
    event = dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, "helper__explore_job", message="failed")
    context = dg.build_run_status_sensor_context("failed_run", event, instance, failed).for_run_failure()
    with caplog.at_level(logging.ERROR, "shop"):
        shop.failed_run(context)
    assert "helper__explore_job r0009: the disk is full" in caplog.text


def test_a_round_that_does_not_exist_is_refused(finished):
    with pytest.raises(UserError, match=r"r0009: .* has no judged_experiences of it; its rounds are r0001 to r0002"):
        rft_platform.load_round(finished.home, 9)
