"""``tune()`` and questions to the store in a notebook, whose event loop runs already and which has no ipywidgets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.instance import open_instance

TUNE = """
from rft_platform.tuner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune


async def solve(task, model):
    client = model.get_openai_async_client()
    messages = [{"role": "user", "content": task["ask"]}]
    answer = await client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=answer.choices[0].message.content)


async def judge(task, response):
    return JudgeOutput(reward=len(response) / 30)


result = tune(
    workflow_func=solve,
    judge_func=judge,
    train_dataset=DatasetConfig(path="data", total_steps=1),
    model=TunerModelConfig(model_path="model", max_model_len=64, max_tokens=6),
    algorithm=AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-4),
    experiment_name="mine",
)
result
"""

ASK = """
from rft_platform.experience.queries import connect
from rft_platform.experience.store import ExperienceStore

with connect(ExperienceStore(result.home / "rounds")) as connection:
    print("conversations:", connection.sql("SELECT count(*) FROM conversations").fetchall()[0][0])
    connection.sql("SELECT conversation_id, thoughts, tool_calls, total_reward FROM conversations").show()
"""

WITHOUT_WIDGETS = """
import sys

sys.modules["ipywidgets"] = None  # as where they are not installed
"""


def executed(notebook: Path, cells: list[str]) -> list[dict[str, Any]]:
    """The outputs of all cells; fails with what nbconvert says where one of them raises."""
    code: list[dict[str, Any]] = [
        {"cell_type": "code", "id": str(number), "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
        for number, cell in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    folders = {
        name: str(notebook.parent / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    command = [*(sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"), notebook.name]
    done = subprocess.run(
        command, cwd=notebook.parent, env={**os.environ, **folders, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return [output for cell in json.loads(notebook.read_text())["cells"] for output in cell["outputs"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_notebook_without_ipywidgets(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"ask": f"{n}+1=?"}) + "\n" for n in range(2)))
    (tmp_path / "model").symlink_to(tiny_model)
    outputs = executed(tmp_path / "my.ipynb", [WITHOUT_WIDGETS, TUNE, ASK])
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert "conversations: 4" in text and "checkpoint" in text
    assert "ipywidgets" not in text and "failed" not in text and "error" not in text, text
    home = Home(tmp_path / "checkpoints" / "AgentScope" / "mine" / ".rft")
    assert ExperienceStore(home.rounds).count_judged(1) == 4
    with open_instance(home, capture_output=False) as instance:
        statuses = {run.status for run in instance.get_runs()}
    assert statuses == {dg.DagsterRunStatus.SUCCESS}
