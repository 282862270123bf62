"""A trainer session in this process, and small rounds of experiences to train on.

Compare gradients, not parameters: Adam turns float noise in gradients near zero into visible differences.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.experience.record import JudgedRow, RolloutRow, row_id
from rft_platform.experience.store import ExperienceStore
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import TrainRequest
from tests.experience.samples import step_row

END = 2  # <|im_end|> of the tiny model
RequestFactory = Callable[..., TrainRequest]


@pytest.fixture
def session(ranks: Ranks) -> TrainingSession:
    """A session that holds nothing yet."""
    return TrainingSession(ranks, "float32")


def make_round(seed: int, groups: int, runs: int, number: int = 1) -> tuple[list[RolloutRow], list[JudgedRow]]:
    """Random prompts and answers, as an untrained model of 512 tokens would sample them, with rewards 0 and 1."""
    rng = np.random.default_rng(seed)
    rows, judged = [], []
    for group in range(groups):
        prompt = rng.integers(5, 500, rng.integers(6, 12)).tolist()
        rewards = rng.permutation(np.arange(runs) % 2).astype(float)
        spread = rewards.std(ddof=1)
        for run, reward in enumerate(rewards):
            answer = [*rng.integers(5, 500, rng.integers(1, 5)).tolist(), END]
            run_id, group_id = f"{seed}-{group}-{run}", f"{seed}-{group}"
            identity = row_id(run_id, 0)
            rows.append(
                step_row(
                    run_id,
                    0,
                    response_ids=answer,
                    rollout_logprobs=[-np.log(512)] * len(answer),
                    prompt_ids=prompt,
                    round=number,
                    task_id=group_id,
                    taskset="random",
                    group_id=group_id,
                )
            )
            advantage = (reward - rewards.mean()) / (spread + 1e-6)
            judged.append(JudgedRow(identity, group_id, run_id, 0, reward, {}, "judge", advantage))
    return rows, judged


def whole_state(folder: str | Path) -> dict[str, np.ndarray]:
    """AdamW's moments in a checkpoint, put together from the shards of all ranks, by name."""
    import torch

    from rft_platform.training.models.shards import ShardReader

    reader = ShardReader(Path(folder) / "trainer_state")
    moments = [name for name in reader.names if name.endswith((".exp_avg", ".exp_avg_sq"))]
    into = {name: torch.zeros(reader.shape(name)) for name in moments}
    reader.read(into)
    return {name: tensor.numpy() for name, tensor in into.items()}


@pytest.fixture
def round_request(tiny_model: Path, tmp_path: Path) -> RequestFactory:
    """``round_request(seed=0, groups=12, runs=4, edit=None, **fields)``: a GRPO request on a round of random rows.

    ``edit(rows, judged)`` may change the rows before they are written.
    """

    def make(seed: int = 0, groups: int = 12, runs: int = 4, edit: Callable | None = None, **fields) -> TrainRequest:
        rows, judged = make_round(seed, groups, runs)
        if edit is not None:
            edit(rows, judged)
        store = ExperienceStore(tmp_path / f"rounds-{seed}-{groups}")
        rollouts = store.write_rollouts(1, 0, rows)
        settings = {
            "parent": str(tiny_model), "parent_version": 0, "output": str(tmp_path / "checkpoints"),
            "algorithm": AlgorithmSpec(), "optimizer": OptimizerSpec(lr=1e-3), "train_batch_size": 16, "seed": 7,
            "rollouts": (str(rollouts),), "judged": (str(store.write_judged(1, "judge", judged)),),
        }  # fmt: skip
        return TrainRequest(**(settings | fields))

    return make


@pytest.fixture
def sft_request(tiny_model: Path, tmp_path: Path) -> RequestFactory:
    """``sft_request(pairs, **fields)``: a request on prompt / answer pairs."""

    def make(pairs: list[tuple[str, str]], **fields) -> TrainRequest:
        file = tmp_path / "demonstrations.parquet"
        pq.write_table(pa.table({"prompt": [p for p, _ in pairs], "response": [a for _, a in pairs]}), file)
        settings = {
            "parent": str(tiny_model), "parent_version": 0, "output": str(tmp_path / "checkpoints"),
            "algorithm": AlgorithmSpec(policy_loss="sft"), "optimizer": OptimizerSpec(lr=3e-3),
            "demonstrations": str(file), "train_batch_size": len(pairs),
        }  # fmt: skip
        return TrainRequest(**(settings | fields))

    return make
