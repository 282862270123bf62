"""Offline trainings on real processes: a killed one goes on, and each leaves weights that are traced to their rows."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.offline import offline_request, required_dataset
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import required
from rft_platform.rounds.setup.connections import connect_registry
from rft_platform.training.service.trainer_client import find_or_start_trainer
from tests.support.builders import wait_until, write_rows

pytestmark = pytest.mark.slow

ADDITIONS = [(a, b) for a in range(6) for b in range(6)]
STEPS = 60


def offline(data: str, algorithm: dict[str, Any], steps: int, held_out: str | None = None) -> dict[str, Any]:
    """What ``small_config`` is changed to; the untrained model needs a larger rate than weights that are polished."""
    tasksets = [{"path": held_out, "name": "held-out", "judge": "judge_by_digits:digit_share"}] if held_out else []
    return {
        "mode": "train",
        "algorithm": {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, **algorithm},
        "buffer": {
            "train_batch_size": 12,
            "total_steps": steps,
            "trainer_input": {"experience_buffer": {"path": data}},
            "explorer_input": {"eval_tasksets": tasksets},
        },
        "trainer": {"save_interval": 10},
    }


def answered(folder: Path) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in ADDITIONS
    ]
    return write_rows(folder / "answered.jsonl", rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offline-data")


@pytest.fixture(scope="module")
def taught(make_project, data):
    """Supervised fine-tuning whose driver and trainer were killed on the way; run again, to its end."""
    held_out = write_rows(data / "held_out.jsonl", [{"question": f"{a}+7=", "answer": str(a + 7)} for a in range(4)])
    project = make_project("sft", **offline(answered(data), {"algorithm_type": "sft"}, STEPS, held_out))
    driver = start(project)
    saved = project.home / "checkpoints" / "small" / "e2e" / "intermediate" / "step_20"
    wait_until(saved.exists, "a checkpoint on the way was published")
    lease = read_lease(project.home / "leases" / "trainer.json")
    assert lease is not None
    psutil.Process(lease.pid).kill()
    driver.kill()
    driver.communicate()
    assert not (project.home / "rounds" / "r0001" / "policy-policy.json").exists(), "it had ended before it was killed"
    project.rft("run", "--config", str(project.config))
    return project


@pytest.fixture(scope="module")
def polished(taught, make_project, data):
    """A preference optimisation from the taught weights, and a distillation of them: side by side."""
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in ADDITIONS]
    dpo = offline(write_rows(data / "pairs.jsonl", pairs), {"algorithm_type": "dpo", "optimizer": {"lr": 1e-4}}, 12)
    answers = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in ADDITIONS]
    weights = taught.note(1, "policy")["folder"]
    algorithm = {"algorithm_type": "gkd", "policy_loss_fn_args": {"beta": 0.0}, "teacher_model_path": weights}
    projects = [
        make_project("dpo", **dpo, model={"model_path": weights, "max_model_len": 64}),
        make_project("distill", **offline(write_rows(data / "answers.jsonl", answers), algorithm, 40)),
    ]
    runs = [start(project) for project in projects]
    said = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    return projects


def start(project) -> subprocess.Popen[str]:
    return subprocess.Popen(
        project.command("run", "--config", str(project.config)),
        env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_sft_is_trained_registered_evaluated_and_shown(taught):
    trained, policy = taught.note(1, "train"), taught.note(1, "policy")
    losses = [event["metrics"]["loss"] for event in trained["step_events"]]
    assert len(losses) == trained["steps"] == policy["policy_version"] == STEPS
    assert losses[-1] < 0.2 * losses[0]
    assert taught.note(0, "evaluation")["results"], "the base model was measured, too"
    assert taught.note(1, "evaluation")["metrics"]["canary_delta"] <= 1e-4
    version = connect_registry(Project.open(Home(taught.home))).versions()[-1]
    assert version.tags["source"].endswith("answered.jsonl")
    assert version.tags["dataset_rows"] == str(len(ADDITIONS))
    assert version.tags["dagster_run_id"]
    with open_instance(Home(taught.home)) as instance:
        runs = instance.get_runs()  # newest first; the killed one was marked when the next began
        assert [(run.job_name, run.status.value) for run in runs] == [("sft_job", "SUCCESS"), ("sft_job", "FAILURE")]
        for name in ("sft_dataset", "sft_checkpoint", "evaluation_report"):
            assert instance.get_materialized_partitions(dg.AssetKey(name)) == {"r0001"}, name


def test_trace_leads_from_the_version_to_file_rows_and_code(taught):
    found = taught.json("trace", "models:/small-e2e/1", "--verify")
    (training,) = found["trainings"]
    rows = pq.read_table(training["dataset"]["path"])
    assert rows.num_rows == training["dataset"]["rows"] == training["rows_trained"] == len(ADDITIONS)
    assert rows["source_row"].to_pylist() == list(range(1, len(ADDITIONS) + 1))
    assert set(rows["source_file"].to_pylist()) == {"answered.jsonl"}
    assert training["more"]["source"].endswith("answered.jsonl")
    assert training["data_unchanged"] is True
    assert training["code_version"] and training["config_digest"] and training["dagster_run_id"]
    said = taught.rft("trace", "r0001").stdout
    assert training["dataset"]["path"] in said and training["more"]["source"] in said


def test_a_killed_training_ends_in_the_weights_of_an_undisturbed_one(taught, tmp_path):
    project = Project.open(Home(taught.home))
    request = offline_request(project, required_dataset(project, 1), required(project.store, 0), "undisturbed")
    trainer = find_or_start_trainer(Home(tmp_path).cluster)
    try:
        result = trainer.train(replace(request, output=str(tmp_path / "undisturbed"), save_interval=None))
    finally:
        trainer.shutdown()
    ours, theirs = (
        load_file(f"{f}/model.safetensors") for f in (taught.note(1, "policy")["folder"], result.checkpoint)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert abs(tensor - theirs[name]).max() <= 1e-6, name
    assert Path(taught.note(1, "policy")["folder"], "tokenizer.json").exists(), "an engine can serve it"


def test_dpo_prefers_the_chosen_answers(polished, taught):
    project, _ = polished
    events = project.note(1, "train")["step_events"]
    first, last = (sum(event["metrics"]["loss"] for event in part) for part in (events[:3], events[-3:]))
    assert last < first
    (training, before) = project.json("trace", "r0001")["trainings"]
    assert training["dataset"]["path"].endswith("preference_pairs.parquet")
    start = taught.note(1, "policy")["folder"]
    assert before["result"]["checkpoint"] == start, "the chain goes on through the weights it started from"
    said = project.rft("trace", "r0001", "--all").stdout
    assert "sft_dataset.parquet of small/e2e  36 rows" in said


def test_distillation_approaches_its_teacher(polished, taught):
    _, project = polished
    losses = [event["metrics"]["loss"] for event in project.note(1, "train")["step_events"]]
    assert losses[-1] < 0.5 * losses[0]
    (training,) = project.json("trace", "r0001")["trainings"]
    assert training["more"]["teacher"] == taught.note(1, "policy")["folder"]
