"""Dagster marks what is out of date, and nothing else: after a run, a judgement, an evaluation and a restart."""

import pytest
import yaml
from unsynced import missing_checks, unsynced

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
