"""The spine on real processes: what a finished project leaves on disk, in Dagster and in MLflow.

Tests marked ``spine`` are the end-to-end part of ``make test``: two rounds of a driver, and one of the daemon whose
trainer is killed.
"""

import json
import re
from pathlib import Path

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from interface import running_ui, wait_for
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.evaluate import evaluate_round
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.round import Round
from rft_platform.rounds.setup.connections import connect_engine, connect_registry, connect_trainer
from rft_platform.rounds.warm_start import make_starting_policy
from rft_platform.run.start import write_config

pytestmark = pytest.mark.slow

CHAIN = ["policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report"]


@pytest.mark.spine
def test_rows_are_whole_and_of_one_version_a_round(finished):
    for number, version in ((1, 0), (2, 2)):
        folder = finished.home / "rounds" / f"r{number:04d}"
        table = pq.read_table(folder / "rollouts")
        assert table.num_rows == 32
        assert set(table["policy_version"].to_pylist()) == {version}
        assert len(set(table["row_id"].to_pylist())) == 32
        judged = pq.read_table(next(folder.glob("judged/*.parquet")))
        assert set(judged["row_id"].to_pylist()) == set(table["row_id"].to_pylist())


@pytest.mark.spine
def test_engine_and_trainer_agree_on_every_update(finished):
    for number in (1, 2):
        assert finished.note(number, "evaluation")["metrics"]["canary_delta"] <= 1e-4
        assert finished.note(number, "train")["engine_mismatch"] <= 1e-4


@pytest.mark.spine
def test_every_asset_of_every_round_is_materialized_in_dagster(finished):
    with open_instance(Home(finished.home)) as instance:
        assert instance.get_dynamic_partitions("rft_round") == ["r0001", "r0002"]
        for name in CHAIN:
            assert instance.get_materialized_partitions(dg.AssetKey(name)) == {"r0001", "r0002"}, name
        runs = instance.get_runs()
        assert {run.job_name for run in runs} == {"warm_start_job", "explore_job", "sync_round_job"}
        assert all(run.status is dg.DagsterRunStatus.SUCCESS for run in runs)
        event = instance.get_latest_materialization_event(dg.AssetKey("rollout_batches"))
        metadata = event.asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == 32
        assert [column.name for column in metadata["dagster/column_schema"].value.columns][:2] == ["row_id", "task_id"]
        assert all(column.description for column in metadata["dagster/column_schema"].value.columns)


@pytest.mark.spine
def test_every_checkpoint_is_a_tagged_model_version(finished):
    project = Project.open(Home(finished.home))
    versions = connect_registry(project).versions()
    assert [int(version.tags["policy_version"]) for version in versions] == [2, 4]
    for number, version in enumerate(versions, start=1):
        policy = finished.note(number, "policy")
        assert version.tags["round"] == str(number)
        assert version.tags["weights_digest"] == policy["weights_digest"]
        assert version.tags["judge_version"] == finished.note(number, "judge")["judge_version"]
        assert version.tags["dagster_run_id"]
        assert Path(policy["folder"], "model.safetensors").exists()
    assert any("champion" in version.aliases for version in versions)


@pytest.mark.spine
def test_checkpoint_loads_in_plain_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.note(2, "policy")["folder"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert tokenizer.chat_template


def test_rounds_command_lists_the_rounds_and_the_next_step(finished):
    told = finished.json("rounds")
    assert [row["round"] for row in told["rounds"]] == [0, 1, 2]
    assert told["next"].startswith("finished")
    assert "r0001" in finished.rft("rounds").stdout


@pytest.mark.spine
def test_trace_goes_back_to_the_rows_and_forward_to_the_versions(finished):
    back = finished.json("trace", finished.note(2, "policy")["folder"])
    text = json.dumps(back)
    assert finished.note(2, "judge")["judge_version"] in text
    assert finished.note(1, "policy")["weights_digest"] in text
    row = pq.read_table(finished.home / "rounds" / "r0001" / "rollouts")["row_id"][0].as_py()
    forward = json.dumps(finished.json("trace", row))
    assert row in forward
    assert "r0001" in forward


def test_a_second_run_of_a_finished_project_does_nothing(finished):
    again = finished.rft("run", "--config", str(finished.config))
    assert "finished" in again.stdout.lower() or "done" in again.stdout.lower()


def test_every_step_and_evaluation_is_in_tensorboard(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (finished.home / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    trained = [event["step"] for number in (1, 2) for event in finished.note(number, "train")["step_events"]]
    for name in ("loss", "mfu", "mismatch_k3", "zero_variance_groups", "flops_share"):
        assert [event.step for event in events.Scalars(f"train/{name}")] == trained
    assert [event.step for event in events.Scalars("eval/greedy_pass")][-2:] == [1, 2]
    (judged,) = [name for name in events.Tags()["scalars"] if name.startswith("round/judge_metrics/")]
    assert judged.endswith("digit_share") and [event.step for event in events.Scalars(judged)] == [1, 2]


@pytest.mark.spine
def test_mlflow_links_rows_models_and_evaluations(finished):
    project = Project.open(Home(finished.home))
    registry = connect_registry(project)
    run = registry.training_run(project.config.name)
    found = run.client.get_run(run.run_id)
    inputs = {(each.dataset.name, each.tags[0].value): each.dataset for each in found.inputs.dataset_inputs}
    for number, version in enumerate(registry.versions(), start=1):
        rows = inputs[f"r{number:04d}", "training"]
        assert version.tags["data_digest"].startswith(rows.digest)
        selection = finished.home / "rounds" / f"r{number:04d}" / "row_selection-policy.parquet"
        assert json.loads(rows.source)["uri"] == str(selection)
        assert json.loads(rows.profile)["num_rows"] == project.store.count_kept(number)
        model = run.client.get_logged_model(version.tags["logged_model"])
        assert model.tags["weights_digest"] == version.tags["weights_digest"]
        assert (model.source_run_id, model.tags["model_version"]) == (run.run_id, str(version.version))
        assert (model.model_id, 2 * number) in {(each.model_id, each.step) for each in found.outputs.model_outputs}
        on = {metric.key: metric.dataset_name for metric in model.metrics}
        assert on["train/loss"] == f"r{number:04d}"
        assert (on["eval/sampled_pass"], "evaluation") in inputs


@pytest.mark.spine
def test_the_mlflow_run_has_parameters_metrics_of_the_judge_and_an_end(finished):
    project = Project.open(Home(finished.home))
    run = connect_registry(project).training_run(project.config.name)
    found = run.client.get_run(run.run_id)
    assert found.info.status == "FINISHED"
    assert float(found.data.params["algorithm.optimizer.lr"]) == 1e-3
    names = " ".join(found.data.metrics)
    assert re.search(r"round/judge_metrics/\S*digit_share", names) and re.search(r"eval/held-out/\S+/mean_at_\d", names)
    assert "judge_by_digits.py" in finished.rft("trace", "r0002").stdout


@pytest.mark.spine
@pytest.mark.timeout(600)
def test_a_round_under_the_daemon_whose_trainer_is_killed_ends_in_the_same_weights(make_project, finished):
    project = make_project("daemon")
    settings = yaml.safe_load(project.config.read_text())
    settings["buffer"]["total_steps"] = 1  # while round 1 is evaluated, a run of round 2 would start
    project.config.write_text(yaml.safe_dump(settings))
    judged, evaluated = (project.home / "rounds" / "r0001" / f"{name}.json" for name in ("judge", "evaluation"))
    with running_ui(project, "--auto"):
        wait_for(judged.exists, "round 1 is judged", 200)
        lease = wait_for(lambda: read_lease(project.home / "leases" / "trainer.json"), "the trainer has started")
        psutil.Process(lease.pid).kill()
        wait_for(evaluated.exists, "round 1 is evaluated", 200)
    weights, expected = (
        load_file(f"{each.note(1, 'policy')['folder']}/model.safetensors") for each in (project, finished)
    )
    assert weights.keys() == expected.keys()
    assert all(abs(tensor - expected[name]).max() <= 1e-6 for name, tensor in weights.items())


def test_a_round_run_as_one_call_ends_with_the_weights_of_its_assets(make_project, finished):
    """``Round.run`` is the reading path of a round: its stages in order are what the assets do one by one."""
    project = make_project("one-call")
    home = Home(project.home)
    write_config(home, load_config(project.config))
    opened = Project.open(home)
    make_starting_policy(opened, connect_engine, connect_trainer, "by hand")
    evaluate_round(opened, connect_engine(opened), connect_registry(opened), 0)

    evaluation = Round(opened, 1, "by hand").run(
        connect_engine(opened), connect_trainer(opened), connect_registry(opened)
    )

    assert project.note(1, "policy")["weights_digest"] == finished.note(1, "policy")["weights_digest"]
    assert evaluation.results
    one_call, assets = (each.note(1, "evaluation")["metrics"] for each in (project, finished))
    assert one_call.keys() == assets.keys()
    alike = [name for name in assets if not name.endswith("_s")]  # seconds are left out
    assert len(alike) > 5
    assert {name: one_call[name] for name in alike} == pytest.approx({name: assets[name] for name in alike}, abs=1e-4)
    assert [version.tags["dagster_run_id"] for version in connect_registry(opened).versions()] == ["by hand"]
