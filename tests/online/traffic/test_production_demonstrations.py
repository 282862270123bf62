"""Corrections of production traffic in rounds: collected once, mixed into the training, erased with their person."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_sealed_json
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.online.forget import forget
from rft_platform.online.project import project_in
from rft_platform.online.traffic.demonstrations import FILE, DemonstrationStore, collect_demonstrations
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.rounds.explore import collect
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, parent_of, publish
from rft_platform.rounds.selection.row_selection import select_rows
from rft_platform.rounds.train import train_request
from rft_platform.training.data import conversations
from tests.online.test_forget import files_with

SECRET = "Mrs Quillfeather lives in Elm Street"


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    """An online project that mixes corrections into its rounds, with two committed rows."""
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "mix", "repeat_times": 2, "experts": {"weight": 0.5}},
            "buffer": {"train_batch_size": 2, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
        }
    )
    project = project_in(Home(tmp_path / "home"), config)
    publish(project.store, Policy(str(tiny_model), 0, "0" * 64, round=0))
    commit(project, "a", "b")
    return project


def commit(project: Project, *msg_ids: str) -> None:
    """Record and commit calls that are one task of two runs."""
    traffic = traffic_store(project)
    for number, msg_id in enumerate(msg_ids):
        recorded: dict[str, Any] = {
            "msg_id": msg_id, "prompt_ids": [1, 2], "response_ids": [3], "rollout_logprobs": [-0.5],
            "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "tools": [], "policy_version": 0,
            "messages": [{"role": "user", "content": f"question {msg_id}"}],
            "response": {"role": "assistant", "content": "x"}, ENGINE: "transformers", TEMPLATE_HASH: "t",
        }  # fmt: skip
        traffic.record([NewCall(msg_id, 0, recorded, 0, 3, time.time(), subject=f"person {msg_id}")])
        given = NewFeedback(f"r-{msg_id}", [msg_id], float(number), task_id=f"t{msg_ids[0]}", run_id=str(number))
        traffic.give_feedback(given)
    traffic.commit()


def correct(project: Project, msg_id: str, correction: str) -> None:
    traffic_store(project).give_feedback(NewFeedback(f"c-{msg_id}", [msg_id], None, correction=correction))


def request_of(project: Project, number: int) -> Any:
    judge(project, number)
    parent = parent_of(project.store, number)
    return train_request(project, parent, number, select_rows(project, number, parent), "run")


def test_corrections_of_all_rounds_so_far_are_mixed_into_a_training(project: Project) -> None:
    assert collect(project, 1).figures["demonstrations"] == 0
    first = request_of(project, 1)
    assert (first.demonstrations, first.algorithm.expert_weight) == (None, None), "nothing was corrected yet"
    publish(project.store, Policy("model", 1, "1" * 64, round=1))
    correct(project, "a", "better a")
    commit(project, "c", "d")
    assert collect(project, 2).figures["demonstrations"] == 1
    publish(project.store, Policy("model", 2, "2" * 64, round=2))
    correct(project, "c", "better c")
    commit(project, "e", "f")
    assert collect(project, 3).figures["demonstrations"] == 1
    third = request_of(project, 3)
    assert third.algorithm.expert_weight == 0.5
    answers = [json.loads(cell)[-1]["content"] for cell in pq.read_table(third.demonstrations)["messages"].to_pylist()]
    assert answers == ["better a", "better c"]
    assert third.lineage["corrections_until"] == 3
    assert third.expert_seed is None, "the file grows: each round takes from a new order"
    assert request_of(project, 3) == third


def test_the_file_of_a_training_stays_for_its_repetition(project: Project) -> None:
    correct(project, "a", "better a")
    collect(project, 1)
    first = Path(request_of(project, 1).demonstrations)
    before = first.read_bytes()
    publish(project.store, Policy("model", 1, "1" * 64, round=1))
    commit(project, "c", "d")
    correct(project, "c", "better c")
    collect(project, 2)
    second = Path(request_of(project, 2).demonstrations)
    assert second != first and first.read_bytes() == before and second.read_bytes() != before


def test_a_correction_that_is_too_long_stops_no_training(project: Project) -> None:
    correct(project, "a", "far too long " * 60)
    collect(project, 1)
    first = request_of(project, 1)
    assert (first.demonstrations, first.algorithm.expert_weight) == (None, None)
    publish(project.store, Policy("model", 1, "1" * 64, round=1))
    commit(project, "c", "d")
    correct(project, "c", "better c")
    collect(project, 2)
    rows = pq.read_table(request_of(project, 2).demonstrations)
    assert rows["msg_id"].to_pylist() == ["c"]


def test_a_template_that_refuses_one_correction_leaves_out_that_one(project: Project, monkeypatch) -> None:
    def refusing(turns: Any, model_folder: Path) -> Any:
        if any(turn.answer["content"] == "refused" for turn in turns):
            raise UserError("the chat template refuses it")
        return [([1], [2]) for _ in turns]

    monkeypatch.setattr(conversations, "tokenise", refusing)
    correct(project, "a", "refused")
    correct(project, "b", "better b")
    collect(project, 1)
    assert pq.read_table(request_of(project, 1).demonstrations)["msg_id"].to_pylist() == ["b"]


def test_a_round_keeps_its_demonstrations_and_a_lost_file_is_written_again(project: Project) -> None:
    correct(project, "a", "better")
    collect(project, 1)
    file = project.store.round_folder(1) / FILE
    before = file.read_bytes()
    correct(project, "b", "later")
    assert collect_demonstrations(project, 1).rows == 1
    file.unlink()
    collect_demonstrations(project, 1)
    assert file.read_bytes() == before


def test_forget_removes_demonstrations_and_names_the_trained_versions(project: Project) -> None:
    correct(project, "a", SECRET)
    correct(project, "b", "another")
    collect(project, 1)
    request_of(project, 1)
    for step, number in ((1, 1), (2, 2)):
        folder = project.home.checkpoints / "rft" / "default" / f"global_step_{step}"
        lineage = {"round": number, "project": "rft", "name": "default", "corrections_until": number}
        write_sealed_json(
            folder / "manifest.json",
            {
                "policy_version": step, "parent": "model", "parent_version": step - 1, "weights_digest": "0" * 64,
                "lineage": lineage, "request": {"output": str(folder.parent)},
            },
        )  # fmt: skip
    assert files_with(project.home.root, SECRET)
    found = forget(project, None, "person a")
    assert files_with(project.home.root, SECRET) == []
    assert [ref.round for ref in found.trained] == [1, 2]
    assert forget(project, None, "person a").trained == found.trained, "a repetition reports the same"
    rows = pq.read_table(project.store.round_folder(1) / FILE)
    assert rows["msg_id"].to_pylist() == ["b"]


def test_a_person_who_is_forgotten_during_a_collection_leaves_no_demonstration(project: Project, monkeypatch) -> None:
    commit(project, "x", "y")
    correct(project, "y", SECRET)
    settle = DemonstrationStore.settle

    def settle_then_forget(self: DemonstrationStore, batch: int) -> Any:
        rows = settle(self, batch)
        forget(project, None, "person y")
        return rows

    monkeypatch.setattr(DemonstrationStore, "settle", settle_then_forget)
    assert collect_demonstrations(project, 1).rows == 0
    assert files_with(project.home.root, SECRET) == []


def test_corrections_are_for_online_projects_only(project: Project, tiny_model: Path) -> None:
    refuse(settings_findings(resolve(project.config), Machine(2, 0)))
    offline = build_config(
        {
            "model": {"model_path": str(tiny_model)},
            "algorithm": {"algorithm_type": "mix", "experts": {}},
            "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        }
    )
    with pytest.raises(UserError, match=r"algorithm\.experts\.path is not set"):
        refuse(settings_findings(resolve(offline), Machine(2, 0)))
