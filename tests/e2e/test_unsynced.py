"""Dagster marks what is out of date, and nothing else: after a run, a judgement, an evaluation and a restart."""

import dagster as dg
import pytest
import yaml
from unsynced import missing_checks, missing_checks_in, unsynced, unsynced_in

from rft_platform.assets.common import rounded
from rft_platform.config.home import Home
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import DagsterNames
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project

ROUNDS = ["policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def synced(make_project):
    """A project of two rounds, which the tests below continue."""
    project = make_project("synced")
    project.rft("run", "--config", str(project.config))
    return project


def test_nothing_is_unsynced_after_a_run(synced):
    assert unsynced(synced.home) == {}
    assert missing_checks(synced.home) == []


def test_the_same_judge_leaves_everything_synced(synced):
    synced.rft("judge", "--rounds", "1-2")
    assert unsynced(synced.home) == {}
    assert missing_checks(synced.home) == []


def test_another_judgement_marks_the_checkpoint_that_was_trained_on_the_earlier_one(synced):
    earlier = synced.note(1, "judge")["judge_version"]
    synced.rft("judge", "--rounds", "1", "--judge", "exact_match")
    expected = {("policy_checkpoint", "r0001"): ["has a new dependency data version: judged_experiences"]}
    assert unsynced(synced.home) == expected
    synced.rft("judge", "--rounds", "1", "--restore", earlier)
    assert unsynced(synced.home) == {}
    assert missing_checks(synced.home) == []


def test_a_repeated_evaluation_and_a_longer_run_leave_everything_synced(synced):
    synced.rft("eval", "--all")
    config = yaml.safe_load(synced.config.read_text())
    config["buffer"]["total_steps"] = 3
    synced.config.write_text(yaml.safe_dump(config))
    synced.rft("run", "--config", str(synced.config))
    assert synced.json("rounds")["next"] == "finished: all 3 rounds are done"
    assert unsynced(synced.home) == {}
    assert missing_checks(synced.home) == []


def test_a_deployment_that_mounts_the_folder_has_its_rounds(synced):
    """Its Dagster instance is new; one tick of a sensor reports what `rft run` has made, and nothing beyond."""
    project, names = Project.open(Home(synced.home)), DagsterNames.of("team/helper")
    resource = ProjectResource(home=str(synced.home))
    definitions = definitions_of(project.config, names, resource)
    sensor = definitions.get_repository_def().get_sensor_def(names.name("next_round_sensor"))
    done = {f"r{number:04d}" for number in range(1, project.rounds_budget + 1)}
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance=instance, resources={names.name("project"): resource})
        for _ in range(2):  # the second tick changes nothing
            skipped = sensor(context)
            assert skipped.skip_message == "all rounds of the budget are done"
            rounds = str(names.rounds.name)
            assert set(instance.get_dynamic_partitions(rounds)) == done
            for name in ROUNDS:
                assert instance.get_materialized_partitions(names.key(name)) == done, name
            events = instance.fetch_materializations(names.key("evaluation_report"), limit=100).records
            assert len(events) == len(done)
        newest = events[0].asset_materialization.metadata
        assert "data:image/png;base64," in newest["report"].value
        measured = synced.note(project.rounds_budget, "evaluation")["metrics"]
        assert newest["sampled_pass"].value == rounded(measured["sampled_pass"])
        assert unsynced_in(instance, definitions, rounds) == {}
        assert list(missing_checks_in(instance, definitions)) == []
