"""``tune()`` and questions to the store in a notebook, whose event loop runs already and which has no ipywidgets.

The notebook of the examples is executed as a newcomer does it, cell by cell.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.instance import open_instance
from rft_platform.rounds.project.record import read

FIRST_PROJECT = Path(__file__).parents[2] / "examples" / "first_project.ipynb"
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


def write_notebook(notebook: Path, cells: list[str]) -> None:
    """Write a notebook with these cells of code."""
    code: list[dict[str, Any]] = [
        {"cell_type": "code", "id": str(number), "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
        for number, cell in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


def executed(notebook: Path) -> list[dict[str, Any]]:
    """The outputs of all cells; fails with what nbconvert says where one of them raises."""
    folders = {
        name: str(notebook.parent / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    command = [*(sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"), notebook.name]
    done = subprocess.run(
        command, cwd=notebook.parent, env={**os.environ, **folders, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return [output for cell in json.loads(notebook.read_text())["cells"] for output in cell.get("outputs", ())]


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What cells printed and returned."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "".join("".join(part) for part in parts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_notebook_without_ipywidgets(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"ask": f"{n}+1=?"}) + "\n" for n in range(2)))
    (tmp_path / "model").symlink_to(tiny_model)
    write_notebook(tmp_path / "my.ipynb", [WITHOUT_WIDGETS, TUNE, ASK])
    text = text_of(executed(tmp_path / "my.ipynb"))
    assert "conversations: 4" in text and "checkpoint" in text
    assert "ipywidgets" not in text and "failed" not in text and "error" not in text, text
    home = Home(tmp_path / "checkpoints" / "AgentScope" / "mine" / ".rft")
    assert ExperienceStore(home.rounds).count_judged(1) == 4
    with open_instance(home, capture_output=False) as instance:
        statuses = {run.status for run in instance.get_runs()}
    assert statuses == {dg.DagsterRunStatus.SUCCESS}


def test_the_first_project_is_stored_without_outputs_and_its_links_resolve() -> None:
    cells = json.loads(FIRST_PROJECT.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert links and [link for link in links if not (FIRST_PROJECT.parent / link).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_project(tmp_path: Path) -> None:
    """Every cell runs, the model gets better, and its trace names the rows and the code."""
    notebook = tmp_path / FIRST_PROJECT.name
    shutil.copy(FIRST_PROJECT, notebook)
    outputs = executed(notebook)
    text = text_of(outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), "no curve"
    assert "models:/shop-prices/" in text and "tasks had right and wrong answers" in text
    assert "warm start" in text and "async def solve" in text, text[-5000:]
    home = Home(tmp_path / "first_project" / "checkpoints" / "shop" / "prices" / ".rft")
    records = [read(ExperienceStore(home.rounds), number) for number in range(4)]
    passed = [record.evaluated.metrics["sampled_pass"] for record in records if record.evaluated]
    assert len(passed) == 4 and passed[-1] >= passed[0] + 0.2
