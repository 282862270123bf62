"""Offline trainings for the control plane: the kind, the plan, the dataset that is written once, the request."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft_platform.algorithms.presets import preset
from rft_platform.common.errors import DamagedError, StorageError, UserError
from rft_platform.common.files import write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import build_config, load_config
from rft_platform.config.resolve import offline_kind
from rft_platform.rounds.offline import (
    check_kind,
    evaluate_offline,
    leaked_tasks,
    load_dataset,
    make_dataset,
    offline_lineage,
    offline_request,
    required_dataset,
)
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, published
from rft_platform.rounds.reporting.lineage import RowFile, trace_checkpoint
from rft_platform.rounds.setup.connections import publish_base
from tests.support.builders import write_rows

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def make_offline(tmp_path, tiny_model):
    """A project of the given algorithm on ten rows, which serve every kind."""
    rows = [{"prompt": f"{n}+1=?", "response": str(n + 1), "chosen": str(n + 1), "rejected": "0"} for n in range(10)]
    source = write_rows(tmp_path / "data.jsonl", rows)

    def make(algorithm_type: str = "sft", algorithm: dict[str, Any] | None = None, **buffer: Any) -> Project:
        trainer_input = {"experience_buffer": {"path": source}}
        config = {
            "mode": "train",
            "model": {"model_path": str(tiny_model)},
            "algorithm": {"algorithm_type": algorithm_type, **(algorithm or {})},
            "buffer": {"train_batch_size": 4, "trainer_input": trainer_input, **buffer},
            "trainer": {"save_interval": 2},
        }
        return Project(Home(tmp_path / "home"), build_config(config))

    return make


@pytest.mark.parametrize(
    ("mode", "algorithm_type", "path", "kind"),
    [
        ("train", "sft", "x.jsonl", "sft"),
        ("train", "dpo", "x.jsonl", "dpo"),
        ("train", "simpo", "x.jsonl", "dpo"),
        ("train", "gkd", "x.jsonl", "distill"),
        ("train", "gkd", None, None),  # works on explored rounds
        ("train", "on_policy_distill", "x.jsonl", None),
        ("train", "grpo", None, None),
        ("both", "grpo", None, None),
    ],
)
def test_kind_follows_from_mode_and_algorithm(mode, algorithm_type, path, kind):
    config = build_config({"mode": mode, "buffer": {"trainer_input": {"experience_buffer": {"path": path}}}})
    assert offline_kind(config, preset(algorithm_type)) == kind


def test_plan_launches_the_training_once_and_then_is_finished(make_offline):
    project = make_offline("dpo")
    (action,) = plan_next(observe(project, Launches())).actions
    assert (action.kind, action.round, action.run_key) == ("dpo", 1, "dpo:r0001:0")
    assert plan_next(observe(project, Launches(running=frozenset({("dpo", 1)})))).waiting == ("r0001 dpo is running",)
    publish(project.store, Policy("folder", 3, "digest", round=1))
    assert not plan_next(observe(project, Launches())).finished, "it is yet to be evaluated"
    evaluate_offline(project, _no_engine, None, 1)  # type: ignore[arg-type]
    assert plan_next(observe(project, Launches())).finished


def _no_engine(project: Project) -> Any:
    raise AssertionError("an engine was started, and there are no held-out tasks")


def test_dataset_is_written_once_and_every_row_names_its_source(make_offline):
    project = make_offline()
    written = make_dataset(project, 1)
    stamp = Path(written.path).stat().st_mtime_ns
    assert make_dataset(project, 1) == written == required_dataset(project, 1)
    assert Path(written.path).stat().st_mtime_ns == stamp
    table = pq.read_table(written.path)
    assert table["source_row"].to_pylist() == list(range(1, 11))
    assert json.loads(table["messages"][3].as_py())[1] == {"role": "assistant", "content": "4"}


def test_a_damaged_dataset_is_refused_and_made_again(make_offline):
    project = make_offline()
    written = make_dataset(project, 1)
    Path(written.path).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="materialise sft_dataset for r0001 again"):
        required_dataset(project, 1)
    assert make_dataset(project, 1).sha256 == written.sha256
    assert required_dataset(project, 1) == written


def test_a_changed_source_is_read_again_until_a_training_used_it(make_offline, tmp_path):
    project = make_offline()
    before = make_dataset(project, 1)
    write_rows(tmp_path / "data.jsonl", [{"prompt": "a", "response": "b"}])
    after = make_dataset(project, 1)
    assert (after.rows, after.digest != before.digest) == (1, True)
    publish(project.store, Policy("folder", 3, "digest", round=1))
    write_rows(tmp_path / "data.jsonl", [{"prompt": "a", "response": "c"}])
    with pytest.raises(UserError, match="has changed since r0001 was trained on it"):
        make_dataset(project, 1)


def test_the_request_does_not_depend_on_its_caller(make_offline):
    project = make_offline("dpo", {"policy_loss_fn_args": {"beta": 0.3}}, total_epochs=3)
    dataset, base = make_dataset(project, 1), publish_base(project)
    request = offline_request(project, dataset, base, "run")
    assert request == offline_request(project, required_dataset(project, 1), publish_base(project), "run")
    assert (request.preferences, request.demonstrations) == (dataset.path, None)
    assert request.reference == request.parent == published(project.store, 0).folder
    assert (request.algorithm.policy_loss, request.algorithm.policy_loss_args) == ("dpo", {"beta": 0.3})
    assert (request.epochs, request.max_steps, request.save_interval) == (3, None, 2)
    assert request.optimizer.total_steps == project.settings.offline_steps(10) == 8
    origin = offline_lineage(project, dataset, "run")
    assert origin["data_digest"] == dataset.digest and origin["source"].endswith("data.jsonl")


def test_pairs_without_a_reference_load_none(make_offline):
    project = make_offline("simpo")
    request = offline_request(project, make_dataset(project, 1), publish_base(project), "run")
    assert (request.algorithm.policy_loss, request.reference) == ("simpo", None)
    assert request.preferences is not None


def test_answers_with_a_label_are_a_dataset_of_kto_and_of_no_loss_that_compares_pairs(make_offline, tmp_path):
    rows = [{"question": f"{n}+1=?", "completion": str(n + n % 2), "good": n % 2} for n in range(4)]
    form = {"prompt_key": "question", "label_key": "good"}
    source = {"experience_buffer": {"path": write_rows(tmp_path / "labels.jsonl", rows), "format": form}}
    table = pq.read_table(make_dataset(make_offline("kto", trainer_input=source), 1).path)
    assert table["label"].to_pylist() == ["false", "true", "false", "true"]
    assert json.loads(table["completion"][3].as_py()) == [{"role": "assistant", "content": "4"}]
    with pytest.raises(
        UserError, match="answers with a label, and the loss dpo compares pairs: set algorithm_type: kto"
    ):
        load_dataset(make_offline("dpo", trainer_input=source))


def test_distillation_names_its_teacher(make_offline, tiny_model):
    project = make_offline("gkd", {"teacher_model_path": str(tiny_model)}, total_steps=5)
    request = offline_request(project, make_dataset(project, 1), publish_base(project), "run")
    assert (request.teacher, request.max_steps) == (str(tiny_model), 5)
    assert request.demonstrations is not None and request.reference is None


def test_the_job_of_another_kind_is_refused(make_offline):
    project = make_offline("sft")
    check_kind(project, "sft", 1)
    with pytest.raises(UserError, match="dpo_job for r0001: the project rft/default runs sft_job for r0001"):
        check_kind(project, "dpo", 1)
    with pytest.raises(UserError, match="runs sft_job for r0001"):
        check_kind(project, "sft", 2)


def test_held_out_tasks_in_the_training_dataset_are_found(make_offline, tmp_path):
    held_out = write_rows(tmp_path / "held.jsonl", [{"question": q, "answer": "2"} for q in (" 1+1=? ", "11+1=?")])
    project = make_offline(explorer_input={"eval_tasksets": [{"path": held_out}]})
    assert [task.prompt for task in leaked_tasks(project, load_dataset(project))] == [" 1+1=? "]


@pytest.mark.parametrize(("name", "kind", "rows"), [("sft", "sft", 90), ("dpo", "dpo", 90), ("distill", "distill", 90)])
def test_examples_load_with_their_data(tmp_path, name, kind, rows):
    project = Project(Home(tmp_path), load_config(EXAMPLES / f"{name}.yaml"))
    assert project.settings.offline == kind
    assert len(load_dataset(project).rows) == rows
    assert not leaked_tasks(project, load_dataset(project))


def test_trace_reports_whether_the_dataset_has_changed(make_offline, tmp_path):
    project = make_offline()
    dataset = make_dataset(project, 1)
    folder = tmp_path / "global_step_3"
    manifest = {
        "policy_version": 3, "parent": "base", "parent_version": 0, "weights_digest": "w",
        "lineage": offline_lineage(project, dataset, "run"),
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    (training,) = trace_checkpoint(folder, project.store, verify=True).trainings
    assert training.dataset == RowFile(dataset.path, dataset.sha256, 10)
    assert (training.rows_trained, training.data_unchanged) == (10, True)

    Path(dataset.path).write_bytes(b"x" * dataset.bytes)
    with pytest.raises(DamagedError, match="changed since the training"):
        trace_checkpoint(folder, project.store, verify=True)

    other = Project(Home(tmp_path / "elsewhere"), project.config)
    (training,) = trace_checkpoint(folder, other.store).trainings
    assert (training.dataset, training.data_unchanged, training.more["dataset_rows"]) == (None, None, 10)
