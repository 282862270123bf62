"""The code location: loads light and fast, and is a graph that Dagster can sort, run and draw."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import dagster as dg
import pytest
import yaml

from rft_platform.assets.checks import (
    CHECKPOINT_CHECKS,
    EVALUATION_CHECKS,
    EXPERIENCE_CHECKS,
    checkpoint_specs,
    evaluation_results,
)
from rft_platform.assets.common import report_table
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.definitions import defs
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.project.code_version import release
from rft_platform.rounds.reporting.reward_audit import Finding
from rft_platform.tasks.dataset import DatasetReport

HEAVY = ["torch", "vllm", "transformers", "mlflow", "pandas", "datasets", "duckdb", "matplotlib", "fastapi"]
AUDITED = Finding("audit_held_out", True, "nothing to compare")
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
def test_offline_weights_are_trained_on_a_dataset_and_evaluated(dataset, weights):
    graph = defs.resolve_asset_graph()
    node = graph.get(dg.AssetKey(weights))
    assert {key.to_user_string() for key in node.parent_keys} >= {"base_model", dataset}
    assert dg.AssetKey("evaluation_report") in node.child_keys
    assert node.pools == {"trainer"}


def test_every_asset_has_description_owner_and_kind():
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
    assert set(jobs) == rounds | offline | upkeep | {"release_job", "prompt_job"}
    assert all(job.description for job in jobs.values())
    assert all(sensor.description for sensor in repository.sensor_defs)
    planned = {"next_round_sensor", "experience_threshold_sensor"}
    assert {sensor.name for sensor in repository.sensor_defs} == planned | {"alert_on_run_failure"}
    assert [schedule.name for schedule in repository.schedule_defs] == ["nightly_evaluation"]


def test_the_gate_check_fails_only_where_the_gate_refused():
    results = [evaluation_results(passed, "why", None, AUDITED)[0].passed for passed in (True, None, False)]
    assert results == [True, True, False]


def test_a_failed_check_of_one_round_stays_after_the_next_round_passes():
    gate = EVALUATION_CHECKS[0]

    @dg.asset(name="evaluation_report", partitions_def=PLAIN_NAMES.rounds, check_specs=EVALUATION_CHECKS)
    def report(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        passed = context.partition_key == "r0002"
        return dg.MaterializeResult(check_results=evaluation_results(passed, "why", None, AUDITED))

    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001", "r0002"])
        for partition in ("r0001", "r0002"):
            dg.materialize([report], instance=instance, partition_key=partition)
        history = instance.event_log_storage.get_asset_check_execution_history(gate.key, limit=10)
    found = {record.partition: record.event.dagster_event.asset_check_evaluation_data.passed for record in history}
    assert found == {"r0001": False, "r0002": True}


def test_every_check_of_a_round_has_a_result_for_each_round():
    specs = [*EXPERIENCE_CHECKS, *CHECKPOINT_CHECKS, *EVALUATION_CHECKS, *checkpoint_specs("sft_checkpoint")]
    assert [spec.name for spec in specs if spec.partitions_def != PLAIN_NAMES.rounds] == []


TASKSET = {"taskset": {"path": "t.jsonl"}}
DATASET = {"trainer_input": {"experience_buffer": {"path": "d.jsonl"}}}
TRAFFIC = {"trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
UPKEEP = {"compact_job", "retention_job", "evaluate_job"}


@pytest.mark.parametrize(
    ("config", "evaluated", "jobs", "unused"),
    [
        (
            {"buffer": {"explorer_input": TASKSET}},
            "policy_checkpoint",
            {"warm_start_job", "explore_job", "sync_round_job", "judge_job"},
            {"sft_dataset", "teacher_model", "online_experiences", "release_report"},
        ),
        (
            {"mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": DATASET},
            "sft_checkpoint",
            {"sft_job"},
            {"task_dataset", "policy_checkpoint", "rollout_batches", "dpo_checkpoint"},
        ),
        (
            {"mode": "train", "algorithm": {"algorithm_type": "dpo"}, "buffer": DATASET},
            "dpo_checkpoint",
            {"dpo_job"},
            {"task_dataset", "policy_checkpoint", "sft_checkpoint"},
        ),
        (
            {"algorithm": {"algorithm_type": "reinforce++"}, "buffer": TRAFFIC},
            "policy_checkpoint",
            {"warm_start_job", "collect_job", "sync_round_job", "judge_job", "release_job"},
            {"rollout_batches", "policy_snapshot", "sft_dataset"},
        ),
    ],
    ids=["rounds", "sft", "dpo", "online"],
)
def test_a_project_has_only_the_assets_and_jobs_that_it_uses(config, evaluated, jobs, unused):
    shown = definitions_of(RftConfig.model_validate({"model": {"model_path": "m"}, **config}))
    graph, repository = shown.resolve_asset_graph(), shown.get_repository_def()
    names = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert not names & unused
    parents = {key.to_user_string() for key in graph.get(dg.AssetKey("evaluation_report")).parent_keys}
    assert parents == {evaluated, "eval_task_dataset"}
    undefined = {key for node in graph.asset_nodes for key in node.parent_keys} - set(graph.get_all_asset_keys())
    assert undefined == set()
    assert {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")} == jobs | UPKEEP
    sensors = {sensor.name for sensor in repository.sensor_defs}
    assert ("experience_threshold_sensor" in sensors) == ("sync_round_job" in jobs)
    (schedule,) = repository.schedule_defs
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED


def specs_of(config):
    config = RftConfig.model_validate({"model": {"model_path": "m"}, "buffer": {"explorer_input": TASKSET}, **config})
    return {spec.key.to_user_string(): spec for spec in definitions_of(config).resolve_all_asset_specs()}


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_kinds_name_the_engine_in_use(engine):
    assert specs_of({"engine": {"kind": engine}})["rollout_batches"].kinds == {"parquet", engine}


def test_a_changed_line_of_the_users_code_changes_the_code_version(tmp_path):
    def versions():
        specs = specs_of({"buffer": {"explorer_input": {"taskset": {"path": "t.jsonl", "workflow": reference}}}})
        return {spec.code_version for spec in specs.values() if spec.key.to_user_string() in CHAIN}

    workflow, reference = tmp_path / "agent.py", f"{tmp_path / 'agent.py'}:solve"
    workflow.write_text("async def solve(task, model): ...\n")
    (before,) = versions()
    assert versions() == {before} and before.startswith(release())
    workflow.write_text("async def solve(task, model): raise ValueError\n")
    (after,) = versions()
    assert after != before
    (without,) = {spec.code_version for name, spec in specs_of({}).items() if name in CHAIN}
    assert without == release()


def test_production_traffic_becomes_overdue():
    online = {"algorithm": {"algorithm_type": "reinforce++"}, "buffer": TRAFFIC}
    policies = {name: spec.freshness_policy for name, spec in specs_of(online).items() if spec.freshness_policy}
    assert set(policies) == {"online_experiences"}
    assert policies["online_experiences"].fail_window.to_timedelta() == timedelta(hours=24)
    assert not any(
        spec.freshness_policy for spec in specs_of({**online, "service": {"freshness_hours": None}}).values()
    )
    assert not any(spec.freshness_policy for spec in specs_of({}).values())


def test_the_schedule_of_the_configuration_is_on():
    config = {
        "model": {"model_path": "m"},
        "buffer": {"explorer_input": TASKSET},
        "evaluation": {"schedule": "0 4 * * 1-5"},
    }
    (schedule,) = definitions_of(RftConfig.model_validate(config)).get_repository_def().schedule_defs
    assert (schedule.cron_schedule, schedule.default_status) == ("0 4 * * 1-5", dg.DefaultScheduleStatus.RUNNING)


def test_the_code_location_reads_the_project_of_its_home(tmp_path):
    write_text(
        Home(tmp_path).config_file,
        yaml.safe_dump({"model": {"model_path": "m"}, "buffer": {"explorer_input": TASKSET}}),
    )
    code = "from rft_platform.definitions import defs; print(defs.resolve_all_asset_keys())"
    environment = {**os.environ, "RFT_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "policy_checkpoint" in done.stdout
    assert "sft_checkpoint" not in done.stdout


def test_a_stored_schedule_that_dagster_refuses_is_off(caplog):
    config = {
        "model": {"model_path": "m"},
        "buffer": {"explorer_input": TASKSET},
        "evaluation": {"schedule": "0 3 * * 9"},
    }
    (schedule,) = definitions_of(RftConfig.model_validate(config)).get_repository_def().schedule_defs
    assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    assert "evaluation.schedule '0 3 * * 9' is not used" in caplog.text


def test_the_definitions_import_no_plugin_of_the_project(tmp_path):
    (tmp_path / "plugin.py").write_text("raise ImportError('imported')")
    config = {"model": {"model_path": "m"}, "buffer": {"explorer_input": TASKSET}}
    config["algorithm"] = {"plugins": [str(tmp_path / "plugin.py")]}
    shown = definitions_of(RftConfig.model_validate(config))
    assert "sft_job" not in [job.name for job in shown.get_repository_def().get_all_jobs()]


def test_the_report_of_a_dataset_is_a_row_of_a_table():
    report = DatasetReport("a.jsonl", ("question", "answer"), 3)
    for line in (2, 3):
        report.drop("empty", f"a.jsonl:{line}")
    (record,) = report_table([report]).records
    assert record.data["dropped"] == "empty: 2" and record.data["dropped_rows"] == "empty: a.jsonl:2, a.jsonl:3"
