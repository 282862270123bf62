"""Several projects in one Dagster deployment: no name of one is a name of another, and each sees its own runs only."""

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox

from rft_platform.common.errors import UserError
from rft_platform.component import ConfiguredProject, RftProjectComponent
from rft_platform.config.home import Home
from rft_platform.config.reference import EDITOR_LINE, SCHEMA_FILE
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.jobs.jobs import add_rounds
from rft_platform.jobs.launches import launches
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.run.start import is_in_force

MODEL = {"model": {"model_path": "m"}}
ROUNDS = {**MODEL, "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}}}
OFFLINE = {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
SFT = {**MODEL, **OFFLINE, "buffer": {"trainer_input": {"experience_buffer": {"path": "d.jsonl"}}}}
#: Dagster's own loader of components causes deprecation and beta warnings.
LOADS_COMPONENTS = pytest.mark.filterwarnings("ignore")
RED, GREEN = DagsterNames.of("red"), DagsterNames.of("team/green")


def definitions(settings: dict[str, Any], names: DagsterNames) -> dg.Definitions:
    return definitions_of(RftConfig.model_validate(settings), names, ProjectResource(home=f"/{names.name('home')}"))


def test_two_projects_share_no_name() -> None:
    alone = [definitions(ROUNDS, RED), definitions(ROUNDS, GREEN)]
    both = dg.Definitions.merge(*alone)
    dg.Definitions.validate_loadable(both)
    repository, graph = both.get_repository_def(), both.resolve_asset_graph()
    assert len(graph.get_all_asset_keys()) == sum(
        len(each.resolve_asset_graph().get_all_asset_keys()) for each in alone
    )
    for node in graph.asset_nodes:
        names = RED if node.key.path[0] == "red" else GREEN
        assert node.key.path[:-1] == list(names.prefix)
        assert {key.path[0] for key in node.parent_keys} <= {node.key.path[0]}
        assert node.partitions_def in (None, names.rounds)
        assert all(pool.startswith(names.name("")) for pool in node.pools or ())
        assert all(check.asset_key == node.key for check in node.check_keys)
        assert all(graph.get(check).partitions_def == node.partitions_def for check in node.check_keys)
    everything = [*repository.get_all_jobs(), *repository.sensor_defs, *repository.schedule_defs]
    named = [each.name for each in everything if each.name != "__ASSET_JOB"]
    assert len(named) == len(set(named))
    assert all(name.startswith(("red__", "team__green__")) for name in named)
    limited = [job for job in repository.get_all_jobs() if "rft/job" in job.run_tags]
    assert {"red__explore_job", "team__green__explore_job"} <= {job.name for job in limited}
    assert all(job.run_tags["rft/job"] == job.name for job in limited)


def test_a_project_without_a_prefix_keeps_the_names_of_earlier_versions() -> None:
    assert PLAIN_NAMES.key("policy_checkpoint") == dg.AssetKey("policy_checkpoint")
    assert (PLAIN_NAMES.name("explore_job"), PLAIN_NAMES.rounds.name) == ("explore_job", "rft_round")
    defined = definitions(ROUNDS, PLAIN_NAMES)
    assert set(defined.resources or {}) == {"project", "engine", "trainer", "registry", "tables"}


def test_a_project_sees_its_own_launches_and_rounds(project: Project) -> None:
    both = dg.Definitions.merge(definitions(ROUNDS, RED), definitions(ROUNDS, GREEN))
    with dg.DagsterInstance.ephemeral() as instance:
        add_rounds(instance, project, RED)
        assert instance.get_dynamic_partitions("red__rft_round") == ["r0001"]
        assert instance.get_dynamic_partitions("team__green__rft_round") == []
        run = instance.create_run_for_job(both.resolve_job_def("red__explore_job"), tags={"dagster/partition": "r0001"})
        instance.report_run_failed(run)
        assert set(launches(instance, names=RED).failures) == {("explore", 1)}
        assert launches(instance, names=GREEN).failures == launches(instance).failures == {}


def alerted(defined: dg.Definitions, names: DagsterNames, run: dg.DagsterRun, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the alert sensor of a project takes a failed run for one of the project's."""
    found: list[str] = []
    monkeypatch.setattr("rft_platform.jobs.alerts.alert_run_failed", lambda home, run, cause: found.append(run.run_id))
    sensor = defined.get_repository_def().get_sensor_def(names.name("alert_on_run_failure"))
    failed = dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, run.job_name)
    context = dg.build_run_status_sensor_context(sensor.name, failed, dg.DagsterInstance.ephemeral(), run)
    sensor(context.for_run_failure(), **{names.name("project"): ProjectResource(home="/home")})
    return bool(found)


@pytest.mark.parametrize(
    ("prefix", "job", "assets", "own"),
    [
        ("", "explore_job", None, True),
        ("", "retention_job", None, True),
        ("", "nightly_dbt_job", None, False),
        ("", "__ASSET_JOB", ["policy_checkpoint"], True),
        ("", "__ASSET_JOB", ["orders"], False),
        ("team", "team__explore_job", None, True),
        ("team", "team__helper__explore_job", None, False),
        ("team", "__ASSET_JOB", ["team", "policy_checkpoint"], True),
        ("team", "__ASSET_JOB", ["team", "helper", "policy_checkpoint"], False),
        ("team", "__ASSET_JOB", ["team", "orders"], False),
    ],
)
def test_a_component_alerts_about_its_own_runs_only(
    prefix: str, job: str, assets: list[str] | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = DagsterNames.of(prefix)
    selected = None if assets is None else frozenset([dg.AssetKey(assets)])
    run = dg.DagsterRun(job_name=job, asset_selection=selected)
    assert alerted(definitions(ROUNDS, names), names, run, monkeypatch) is own


def test_only_the_sensor_of_a_homes_own_instance_reads_runs_of_all_code_locations() -> None:
    config = RftConfig.model_validate(ROUNDS)
    for defined, everywhere in ((definitions_of(config), True), (definitions(ROUNDS, PLAIN_NAMES), False)):
        sensor = defined.get_repository_def().get_sensor_def("alert_on_run_failure")
        assert sensor._monitor_all_code_locations is everywhere


def test_a_sensor_requests_its_own_jobs_and_partitions(project: Project) -> None:
    names = DagsterNames.of("red")
    defined = definitions_of(project.config, names, ProjectResource(home=str(project.home.root)))
    sensor = defined.get_repository_def().get_sensor_def("red__next_round_sensor")
    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"red__project": ProjectResource(home=str(project.home.root))}
        (request,) = sensor(dg.build_sensor_context(instance=instance, resources=resources)).run_requests
    assert request.job_name == "red__warm_start_job"


@pytest.mark.parametrize("prefix", ["a b", "1st", "a//b-c", ["a", ""]])
def test_a_prefix_that_dagster_would_refuse_is_refused(prefix: Any) -> None:
    with pytest.raises(UserError, match="expected letters, digits and underscores"):
        DagsterNames.of(prefix)


def test_the_entry_point_names_the_module_of_the_component() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = pyproject["project"]["entry-points"]["dagster_dg_cli.registry_modules"].values()
    found = import_module(module)
    assert "RftProjectComponent" in dir(found)
    assert found.RftProjectComponent is RftProjectComponent


@LOADS_COMPONENTS
def test_a_scaffolded_component_loads() -> None:
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.scaffold_component(component_cls=RftProjectComponent, defs_path="helper")
        attributes = yaml.safe_load((folder / "defs.yaml").read_text())["attributes"]
        assert attributes == {"config": "rft.yaml", "rft_home": ".rft/helper", "key_prefix": "helper"}
        assert (folder / "rft.yaml").read_text().startswith(EDITOR_LINE) and (folder / SCHEMA_FILE).is_file()
        with sandbox.load_component_and_build_defs(defs_path=folder) as (component, defs):
            assert isinstance(component, RftProjectComponent)
            assert dg.AssetKey(["helper", "policy_checkpoint"]) in defs.resolve_all_asset_keys()
            resource = (defs.resources or {})["helper__project"]
            assert Path(resource.home) == sandbox.project_root / ".rft" / "helper"


@LOADS_COMPONENTS
def test_settings_may_be_in_the_components_file() -> None:
    with create_defs_folder_sandbox() as sandbox:
        yaml_of = {"type": "rft_platform.RftProjectComponent", "attributes": {"rft_home": ".rft", "project": SFT}}
        folder = sandbox.scaffold_component(component_cls=RftProjectComponent, defs_path="tuned")
        (folder / "defs.yaml").write_text(yaml.safe_dump(yaml_of))
        with sandbox.load_component_and_build_defs(defs_path=folder) as (_, defs):
            assert dg.AssetKey("sft_checkpoint") in defs.resolve_all_asset_keys()


@pytest.mark.parametrize("attributes", [{"rft_home": "h"}, {"rft_home": "h", "config": "c", "project": {}}])
def test_a_component_has_one_source_of_its_configuration(attributes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either config"):
        RftProjectComponent(**attributes)


@pytest.mark.slow
def test_a_changed_configuration_is_put_in_force_between_runs(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    buffer = {"total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl", "judge": "exact_match"}}}
    settings = {"model": {"model_path": str(tiny_model), "max_model_len": 64}, "buffer": {"batch_size": 1, **buffer}}
    (file := tmp_path / "given.yaml").write_text(yaml.safe_dump(settings))
    home, seen = Home(tmp_path / "home"), list[int]()
    resource = ConfiguredProject(home=str(home.root), config=str(file))
    assert not is_in_force(home, resource.read())

    @dg.asset
    def first_stage(project: ProjectResource) -> None:
        seen.append(project.open().config.buffer.total_steps)
        file.write_text("buffer: [half edited")

    @dg.asset(deps=[first_stage])
    def second_stage(project: ProjectResource) -> None:
        seen.append(project.open().config.buffer.total_steps)

    @dg.sensor(target=[first_stage])
    def tick(project: ProjectResource) -> dg.SkipReason:
        seen.append(project.open().config.buffer.total_steps)
        return dg.SkipReason("")

    def evaluate() -> None:
        with dg.build_sensor_context(resources={"project": resource}) as context:
            tick.evaluate_tick(context)

    assert dg.materialize([first_stage, second_stage], resources={"project": resource}).success
    assert seen == [1, 1], "the run goes on with the configuration with which it started"
    file.write_text(yaml.safe_dump(settings))
    written = home.config_file.stat().st_mtime_ns
    evaluate()
    assert home.config_file.stat().st_mtime_ns == written, "an unchanged file is not written again"
    file.write_text(yaml.safe_dump({**settings, "buffer": {**settings["buffer"], "total_steps": 7}}))
    evaluate()
    assert seen == [1, 1, 1, 7]
