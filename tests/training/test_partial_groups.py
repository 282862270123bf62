"""Groups of which some runs failed: what ``explorer.group_policy`` keeps is judged and trained, nothing refuses it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rft_platform.assets.checks import experience_results
from rft_platform.common.errors import UserCodeError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.explore import explore
from rft_platform.rounds.judge import judge, quality
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Policy, publish, read
from rft_platform.rounds.selection.row_selection import select_rows
from rft_platform.rounds.train import train_request

AGENT = """
runs = {}

async def solve(task, model):
    answer = await model.chat([{"role": "user", "content": task["question"]}])
    number = runs[task["question"]] = runs.get(task["question"], 0) + 1
    if task["question"] == "1+1?" and number == 1 or task["question"] == "2+2?" and number < 4:
        raise RuntimeError("this run fails")
    return {"number": number, "text": answer["content"]}


async def run(task, model):
    from rft_platform.rollout.workflow import WorkflowOutput

    found = await solve(task, model)
    return WorkflowOutput(reward=float(found["number"] % 2), response=found["text"])
"""


def start(folder: Path, model: Path, policy: str) -> Project:
    """A project of three tasks with four runs each: of the second one fails, of the third all but one."""
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}+{i}?", "answer": "x"}) + "\n" for i in range(3))
    )
    taskset: dict[str, Any] = {
        "path": str(folder / "tasks.jsonl"),
        "workflow": f"{folder / 'agent.py'}:run",
        "judge": None,
    }
    taskset["task_selector"] = {"selector_type": "sequential"}
    config = {
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 4},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
        "explorer": {"group_policy": policy, "max_retry_times": 0},
        "buffer": {"batch_size": 3, "train_batch_size": 12, "total_steps": 1, "explorer_input": {"taskset": taskset}},
    }
    return Project(Home(folder / "home"), build_config(config))


@pytest.mark.parametrize(("policy", "rows", "partial"), [("partial", 8, 2), ("drop", 4, 0)])
def test_explore_judge_train(
    policy: str, rows: int, partial: int, tmp_path: Path, tiny_model: Path, policy_engine: PolicyEngine, session: Any
) -> None:
    project, status = start(tmp_path / policy, tiny_model, policy), policy_engine.status()
    served = Policy(str(status.weights_path), status.policy_version, status.weights_digest, 0)
    publish(project.store, served)
    note = explore(project, policy_engine, served, 1)
    assert (note.rows, note.figures["partial_groups"]) == (rows, partial)
    summary = judge(project, 1)
    assert summary.figures["rows_with_signal"] == rows - partial // 2, "a run alone has nothing to be compared with"
    assert summary.sound and project.store.judge_version(1) == summary.judge_version
    checks = {r.check_name: r.passed for r in experience_results(*quality(project, 1, summary.judge_version), [])}
    assert checks["groups_are_complete"] and checks["rows_are_sound"]
    request = train_request(project, served, 1, select_rows(project, 1, served), "run")
    result = session.train(request, lambda event: None, lambda *_: False)
    assert result.steps == 1 and result.weights_digest != status.weights_digest


def test_the_error_without_any_whole_group_names_the_failures(
    tmp_path: Path, tiny_model: Path, policy_engine: PolicyEngine
) -> None:
    project, status = start(tmp_path / "drop", tiny_model, "drop"), policy_engine.status()
    agent = tmp_path / "drop" / "agent.py"
    agent.write_text(AGENT.replace('task["question"] == "1+1?" and number == 1', "number == 1"))
    served = Policy(str(status.weights_path), status.policy_version, status.weights_digest, 0)
    with pytest.raises(UserCodeError) as failure:
        explore(project, policy_engine, served, 1)
    assert re.search(
        r"no task has a whole group of 4 runs \(algorithm.repeat_times\): all 3 groups were dropped "
        r"\(explorer.group_policy drop\) for 5 failed and 0 stopped runs of 12. Failed attempts: 5 x RuntimeError: "
        r"this run fails.*explorer.group_policy: partial",
        str(failure.value),
    )
    assert isinstance(failure.value.__cause__, RuntimeError) and not read(project.store, 1).has(Explored)
