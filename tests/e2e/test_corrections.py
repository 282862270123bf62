"""Corrections of production traffic are learned by the job of supervised fine-tuning."""

import json
import time

import pytest

from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from tests.e2e.conftest import ProjectFolder, small_config

pytestmark = pytest.mark.slow

STEPS = 8


def test_corrections_become_weights_that_are_traced_to_calls_and_feedback(make_project, tmp_path, tiny_model) -> None:
    online = ProjectFolder(tmp_path / "home", tmp_path / "rft.yaml")
    online.home.mkdir()
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    settings = small_config(tmp_path, tiny_model) | {"algorithm": {"algorithm_type": "reinforce++"}, "buffer": buffer}
    (online.home / "rft.yaml").write_text(json.dumps(settings))
    traffic = traffic_store(open_project(Home(online.home)))
    for number in range(8):
        question = [{"role": "user", "content": f"{number}+1="}]
        answer = {"messages": question, "tools": [], "response": {"role": "assistant", "content": "?"}}
        traffic.record([NewCall(f"m{number}", 0, answer, 0, 5, time.time())])
        traffic.give_feedback(NewFeedback(f"f{number}", [f"m{number}"], 0.0, correction=str(number + 1)))
    file = tmp_path / "corrections.jsonl"
    assert "8 demonstrations written" in online.rft("store", "demonstrations", str(file)).stdout

    sft = make_project(
        "corrected",
        mode="train",
        algorithm={"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
        buffer={
            "train_batch_size": 8, "total_steps": STEPS, "trainer_input": {"experience_buffer": {"path": str(file)}},
            "explorer_input": {"eval_tasksets": []},
        },
    )  # fmt: skip
    sft.rft("run", "--config", str(sft.config))
    losses = [event["metrics"]["loss"] for event in sft.note(1, "train")["step_events"]]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert sft.note(1, "dataset")["rows"] == 8
    row = json.loads(file.read_text().splitlines()[2])
    assert (row["msg_id"], row["feedback_id"], row["messages"][-1]["content"]) == ("m2", "f2", "3")
