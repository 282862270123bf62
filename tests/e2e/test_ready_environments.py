"""Environments that others made, trained for one round each: a taskset of verifiers and task folders of Harbor."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.experience.record import RolloutRow
from rft_platform.experience.store import ExperienceStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def one_round(make_project: Any, example: str, model: Path, **settings: Any) -> tuple[Any, list[RolloutRow]]:
    """The project of an example after one round, and the rows of its runs."""
    project = make_project(example)
    folder = project.config.parent
    shutil.copytree(EXAMPLES / example, folder / example, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
    config = yaml.safe_load((EXAMPLES / example / "rft.yaml").read_text())
    config["model"]["model_path"] = str(model)
    config["buffer"] |= {"total_steps": 1, "batch_size": 3}
    (folder / example / "rft.yaml").write_text(yaml.safe_dump({**config, **settings}))
    project.rft("run", "--config", str(folder / example / "rft.yaml"), timeout=500)
    return project, ExperienceStore(project.home / "rounds").rollout_rows(1)


def check_rows(project: Any, rows: list[RolloutRow], model: Path) -> None:
    """Rows of three tasks, four runs each, hold the tokens that the engine saw and sampled, and were trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len({row.task_id for row in rows}) == 3 and len({row.run_id for row in rows}) == 12
    for row in rows:
        assert len(row.response_ids) == len(row.rollout_logprobs) > 0
        text = tokenizer.apply_chat_template(
            row.messages, tools=row.tools or None, add_generation_prompt=True, tokenize=False
        )
        assert row.prompt_ids == tokenizer.encode(text, add_special_tokens=False)
    assert project.note(1, "train")["metrics"]["loss"] is not None
    rewards = [row.run_reward for row in rows if row.run_reward is not None]
    assert len(rewards) == 12 and len(set(rewards)) > 1, rewards


def test_a_taskset_of_verifiers_is_trained(make_project: Any, tiny_model: Path) -> None:
    python = Path(os.environ.get("RFT_AGENT_ENVS") or EXAMPLES) / "verifiers" / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("no examples/verifiers/.venv (make test-agents, or examples/verifiers/setup.sh)")
    workers = {"kind": "process", "python": str(python), "count": 1}
    project, rows = one_round(make_project, "verifiers", tiny_model, explorer={"workers": workers})
    check_rows(project, rows, tiny_model)
    for row in rows:
        match = re.search(r"(\d+)([-+*])(\d+)", row.messages[-1]["content"])
        assert match is not None
        expected = OPERATIONS[match[2]](int(match[1]), int(match[3]))
        answer = (row.response["content"] or "").strip()
        numbers = re.findall(r"-?\d+", answer)
        right = float(bool(numbers) and int(numbers[-1]) == expected)
        short = min(1.0, max(0.0, (50 - len(answer)) / 40))
        assert row.run_reward == pytest.approx(right + 0.1 * short), "verifiers' sum of its weighted rewards"
        assert row.metrics["characters"] == len(answer) and row.metrics["short"] == pytest.approx(0.1 * short)


def test_task_folders_of_harbor_are_trained(make_project: Any, tiny_model: Path) -> None:
    project, rows = one_round(make_project, "harbor", tiny_model)
    check_rows(project, rows, tiny_model)
    assert {row.tools[0]["function"]["name"] for row in rows} == {"bash"}
    brief = [
        row for row in rows if "at most 10 characters" in row.messages[0]["content"] and row.run_reward is not None
    ]
    assert len(brief) == 4
    for row in brief:
        size = len((row.run_output or "").encode())
        assert row.run_reward == pytest.approx(min(1.0, max(0.0, (60 - size) / 50))), "what tests/test.sh wrote"
