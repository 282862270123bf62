"""Every preset that explores, from its configuration through judge and trainer to a checkpoint: no part is missing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from rft_platform.algorithms.presets import PRESETS
from rft_platform.common.digests import digest_weights
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.record import RolloutRow
from rft_platform.recipes.tiny_model import build_model
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Policy, publish, required, write
from rft_platform.rounds.selection.row_selection import select_rows
from rft_platform.rounds.train import train_request
from rft_platform.rounds.warm_start import write_experts
from tests.experience.samples import step_row

END = 2  # <|im_end|> of the tiny model
EXPLORING = [name for name, found in PRESETS.items() if found.trains_on == "rollouts"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary."""
    return build_model(tmp_path_factory.mktemp("teacher") / "model", seed=5)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}+1", "answer": str(i + 1)}) + "\n" for i in range(4)))
    return file


def project_of(tmp_path: Path, model: Path, tasks: Path, name: str, **algorithm: Any) -> Project:
    config = build_config(
        {
            "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 8},
            "algorithm": {"algorithm_type": name, "repeat_times": 4, "optimizer": {"lr": 1e-3}, **algorithm},
            "buffer": {
                "batch_size": 4,
                "train_batch_size": 64,
                "total_steps": 2,
                "explorer_input": {"taskset": {"path": str(tasks)}},
            },
        }
    )
    project = Project(Home(tmp_path / "home"), config)
    write_experts(project)
    publish(project.store, Policy(str(model), 0, digest_weights(model), 0))
    return project


def explore(project: Project, model_folder: Path) -> None:
    """Two-step runs of four tasks: half the answers are right, task 0 is always right, run 3 of each is too long.

    If the algorithm asks for a greedy run of each task, it is run 0.
    """
    model, rng = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), np.random.default_rng(3)
    rows = []
    for index, task in enumerate(project.tasks.tasks):
        for repeat in range(4):
            prompt = [int(t) for t in np.random.default_rng(index).integers(5, 500, 7)]
            right = index == 0 or repeat % 2 == 0
            for step in range(2):
                length = 8 if repeat == 3 else int(rng.integers(2, 6))
                answer = [*rng.integers(5, 500, length - 1).tolist(), END]
                logprobs = sampled_logprobs(model, prompt, answer)
                rows.append(row(task, f"{index}-{repeat}", step, prompt, answer, logprobs, right))
                if repeat == 0 and project.settings.algorithm.greedy_run:
                    rows[-1].call.temperature = 0.0
                prompt = [*prompt, *answer, 7, 8]
    project.store.write_rollouts(1, 0, rows)


def sampled_logprobs(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """What an engine would say of ``answer``."""
    ids = torch.tensor([*prompt, *answer])
    with torch.no_grad():
        table = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found: list[float] = table.gather(1, ids[len(prompt) :, None])[:, 0].tolist()
    return found


def row(
    task: Any, run: str, step: int, prompt: list[int], answer: list[int], logprobs: list[float], right: bool
) -> RolloutRow:
    return step_row(
        run, step, response_ids=answer, prompt_ids=prompt, rollout_logprobs=logprobs, task_id=task.task_id,
        taskset=task.taskset, group_id=run.split("-")[0], env_state_hash=f"state {step}",
        run_output=(task.answer if right else "wrong") if step else None,
    )  # fmt: skip


def ignore(*_: object) -> bool:
    return False


@pytest.mark.slow
def test_passes_over_a_round_and_the_schedule_reach_the_trainer(tmp_path: Path, tiny_model: Path, tasks: Path) -> None:
    project = project_of(tmp_path, tiny_model, tasks, "ppo", epochs=3, critic={"warmup_steps": 2})
    explore(project, tiny_model)
    judge(project, 1)
    write(project.store, 1, Explored())
    selection = select_rows(project, 1, required(project.store, 0))
    request = train_request(project, required(project.store, 0), 1, selection, "run")
    assert (request.epochs, selection.steps, project.length.steps) == (3, 3, 6)
    assert (request.optimizer.schedule_start, request.optimizer.total_steps) == (2, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLORING)
def test_from_configuration_to_checkpoint(
    name: str, tmp_path: Path, tiny_model: Path, teacher: Path, tasks: Path, session: Any
) -> None:
    found, keys = PRESETS[name], {}
    if found.teacher:
        keys["teacher_model_path"] = str(teacher)
    if found.experts:
        keys["experts"] = {"path": str(tasks), "batch_size": 2}
    project = project_of(tmp_path, tiny_model, tasks, name, **keys)
    explore(project, tiny_model)
    summary = judge(project, 1)
    assert summary.sound
    assert summary.mean_reward == pytest.approx(0.375 if name == "dapo" else 0.625)  # dropped runs count too
    with_signal = {"dapo": 24, "rft": 20, "opmd": 24, "asymre": 32}  # asymre imitates where all runs are right
    with_signal["remax"] = 12  # the greedy runs are right, as is run 2
    assert summary.figures["rows_with_signal"] == with_signal.get(name, 24 if found.advantage else 32)
    start = required(project.store, 0)
    write(project.store, 1, Explored())
    request = train_request(project, start, 1, select_rows(project, 1, start), "run")
    assert request.expert_seed == project.config.seed != request.seed, "one order of the demonstrations for all rounds"
    events: list[Any] = []
    result = session.train(request, events.append, ignore)
    assert result.steps == 1
    assert result.weights_digest != digest_weights(tiny_model)
    metrics = events[0].metrics
    assert 0 < metrics["grad_norm"] < 1e3
    if found.policy_loss == "ppo":
        assert metrics["mismatch_abs"] < 1e-4
    assert metrics["rows"] == {"dapo": 24, "rft": 20, "mix": 34, "remax": 24}.get(name, 32)
    column = pq.read_table(request.judged[0])["advantage"].to_numpy()
    assert np.any(column) == (found.advantage is not None)
