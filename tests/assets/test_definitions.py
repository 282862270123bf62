"""The code location: loads light and fast, and is a graph that Dagster can sort, run and draw."""

import json
import subprocess
import sys

import dagster as dg
import pytest

from rft_platform.assets.checks import evaluation_results
from rft_platform.definitions import defs
from rft_platform.rounds.evaluate import gate_passed

HEAVY = ["torch", "vllm", "transformers", "mlflow", "pandas", "datasets", "duckdb", "matplotlib", "fastapi"]
CHAIN = ["policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report"]


@pytest.mark.slow
def test_definitions_load_light_and_fast(tmp_path):
    code = (
        "import json, sys, time, rft_platform.definitions;"
        f"print(json.dumps([[name for name in {HEAVY!r} if name in sys.modules], time.process_time()]))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    heavy, processor_seconds = json.loads(loaded.stdout)
    assert heavy == []
    assert processor_seconds < 5


def test_graph_sorts_and_the_round_runs_left_to_right():
    order = [key.to_user_string() for key in defs.resolve_asset_graph().toposorted_asset_keys]
    assert [name for name in order if name in CHAIN] == CHAIN
    assert order.index("warm_start_checkpoint") < order.index("policy_snapshot")
    assert order.index("base_model") < order.index("warm_start_checkpoint")


@pytest.mark.parametrize(
    ("dataset", "weights"),
    [
        ("sft_dataset", "sft_checkpoint"),
        ("preference_pairs", "dpo_checkpoint"),
        ("sft_dataset", "distilled_checkpoint"),
    ],
)
def test_offline_weights_come_of_a_dataset_and_are_evaluated(dataset, weights):
    graph = defs.resolve_asset_graph()
    node = graph.get(dg.AssetKey(weights))
    assert {key.to_user_string() for key in node.parent_keys} >= {"base_model", dataset}
    assert dg.AssetKey("evaluation_report") in node.child_keys
    assert node.pools == {"trainer"}


def test_every_asset_tells_what_it_is():
    graph = defs.resolve_asset_graph()
    groups = set()
    for node in graph.asset_nodes:
        assert node.description, node.key
        assert node.owners == ["team:rft"], node.key
        assert node.kinds, node.key
        groups.add(node.group_name)
    assert len(groups) <= 6


def test_rounds_are_partitions_of_the_whole_chain():
    graph = defs.resolve_asset_graph()
    for name in CHAIN:
        partitions = graph.get(dg.AssetKey(name)).partitions_def
        assert isinstance(partitions, dg.DynamicPartitionsDefinition)
        assert partitions.name == "rft_round"


def test_engine_and_trainer_work_in_pools_of_their_own():
    graph = defs.resolve_asset_graph()
    pools = {name: graph.get(dg.AssetKey(name)).pools for name in CHAIN}
    assert pools["rollout_batches"] == pools["evaluation_report"] == {"engine"}
    assert pools["policy_checkpoint"] == {"trainer"}


def test_jobs_sensors_and_schedule_are_named_and_described():
    repository = defs.get_repository_def()
    jobs = {job.name: job for job in repository.get_all_jobs() if not job.name.startswith("__")}
    upkeep = {"compact_job", "retention_job"}
    offline = {"sft_job", "dpo_job", "distill_job"}
    rounds = {"warm_start_job", "explore_job", "collect_job", "sync_round_job", "evaluate_job", "judge_job"}
    assert set(jobs) == rounds | offline | upkeep | {"release_job"}
    assert all(job.description for job in jobs.values())
    assert all(sensor.description for sensor in repository.sensor_defs)
    planned = {"next_round_sensor", "experience_threshold_sensor"}
    assert {sensor.name for sensor in repository.sensor_defs} == planned | {"alert_on_run_failure"}
    assert [schedule.name for schedule in repository.schedule_defs] == ["nightly_evaluation"]


def test_the_gate_check_fails_only_where_the_gate_refused():
    assert [evaluation_results(passed, "why")[0].passed for passed in (True, None, False)] == [True, True, False]
    evaluated, old = {"results": [{}], "promoted": False}, {"results": [], "promoted": False}
    assert gate_passed(evaluated | {"gate_passed": None}) is None, "it was to promote nothing"
    assert gate_passed(evaluated | {"gate_passed": True}) is True, "it passed, but has no model version"
    assert gate_passed(evaluated) is False, "a note of an earlier version"
    assert gate_passed(old) is None
