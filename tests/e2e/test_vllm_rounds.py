"""GRPO on vLLM: rounds that explore with its engine make the policy better, and engine and trainer agree."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

RUN_S = 800  # a minute on a quiet machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S + 60)]
ROUNDS = 5


def mean_reward(project: Any, number: int) -> float:
    table = pq.read_table(next((project.home / "rounds" / f"r{number:04d}").glob("judged/*.parquet")))
    rewards = table["reward"].to_pylist()
    return float(sum(rewards) / len(rewards))


def test_rewards_rise_from_round_to_round(make_project: Any, vllm_python: Path) -> None:
    project = make_project(
        "vllm",
        engine={"kind": "vllm", "python": str(vllm_python), "kv_cache_gb": 0.5},
        algorithm={"algorithm_type": "grpo", "repeat_times": 16, "optimizer": {"lr": 1e-3}},
    )
    config = yaml.safe_load(project.config.read_text())
    config["buffer"] |= {"batch_size": 16, "train_batch_size": 64, "total_steps": ROUNDS}
    project.config.write_text(yaml.safe_dump(config))

    project.rft("run", "--config", str(project.config), timeout=RUN_S)

    rewards = [mean_reward(project, number) for number in range(1, ROUNDS + 1)]
    assert rewards[-1] > rewards[0] + 0.2, rewards
    for number in range(1, ROUNDS + 1):
        assert project.note(number, "train")["engine_mismatch"] <= 1e-4
        versions = pq.read_table(project.home / "rounds" / f"r{number:04d}" / "rollouts")["policy_version"].to_pylist()
        assert len(set(versions)) == 1
