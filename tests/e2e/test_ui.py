"""The interface for real: webserver, daemon and MLflow as `rft ui` starts them; a round launched as a person would."""

from collections.abc import Iterator
from typing import Any

import pytest
from interface import Ui, running_ui

pytestmark = pytest.mark.slow


@pytest.fixture
def ui(make_project, test_data, tiny_model) -> Iterator[tuple[Ui, Any]]:
    """The interface of a project on GSM8K rows that nothing has run in yet."""
    tasks = {"path": str(test_data / "data" / "gsm8k"), "judge": "gsm8k"}
    project = make_project(
        "ui",
        model={"model_path": str(tiny_model), "max_model_len": 2048, "max_response_tokens": 8},
        buffer={
            "batch_size": 4,
            "total_steps": 1,
            "explorer_input": {
                "taskset": {**tasks, "split": "train", "limit": 32},
                "eval_tasksets": [{**tasks, "split": "test", "limit": 4}],
            },
        },
    )
    with running_ui(project) as interface:
        yield interface, project


def test_a_round_on_gsm8k_from_the_launchpad(ui):
    interface, project = ui
    interface.run_to_success("warm_start_job")
    interface.add_round("r0001")
    interface.run_to_success("explore_job", "r0001")
    interface.run_to_success("sync_round_job", "r0001")
    assert project.note(1, "explore")["rows"] == 16
    assert project.note(1, "train")["steps"] == 0
    assert project.note(1, "evaluation")["results"]
