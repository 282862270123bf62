"""PPO on two ranks: the same steps as on one, checkpoints that either reads, and a killed group that goes on equal."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, OptimizerSpec
from rft_platform.common.errors import NonFiniteError, TrainerError
from rft_platform.config.home import Home
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.models.shards import ShardReader
from rft_platform.training.protocol import Layout, StepEvent, TrainRequest, TrainResult
from rft_platform.training.service.trainer_client import find_or_start_trainer

pytestmark = pytest.mark.slow

FREE = OptimizerSpec(lr=1e-3, clip_grad=1e9)
PPO = AlgorithmSpec(
    token_advantage="gae", token_advantage_args={"lam": 0.95, "gamma": 0.99}, critic=CriticSpec(optimizer=FREE)
)
SAME = ("loss", "grad_norm", "value_loss", "critic_grad_norm", "value_mean", "return_mean", "explained_variance")


def moments(folder: Path) -> dict[str, np.ndarray]:
    """AdamW's moments of policy and critic, whole, whoever wrote them."""
    found: dict[str, np.ndarray] = {}
    for place in ("", "critic"):
        where = folder / "trainer_state" / place
        reader = ShardReader(where)
        names = [name for name in reader.names if name.rpartition(".")[2] in ("exp_avg", "exp_avg_sq", "step")]
        whole = {name: torch.zeros(reader.shape(name)) for name in names}
        reader.read(whole)
        found |= {f"{place}:{name}": value.numpy() for name, value in whole.items()}
    return found


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys() and any(name.startswith("critic:") for name in one)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def weights(result: TrainResult) -> dict[str, np.ndarray]:
    folder = Path(result.checkpoint)
    return {f"policy:{name}": v for name, v in load_file(folder / "model.safetensors").items()} | {
        f"critic:{name}": v for name, v in load_file(folder / "trainer_state" / "critic" / "model.safetensors").items()
    }


@pytest.mark.timeout(120)  # without an agreement of the ranks, the other rank waits for ever
def test_an_error_on_one_rank_is_raised_on_all(round_request: Callable[..., TrainRequest], tmp_path: Path) -> None:
    """A reward that is not finite is on one rank only, because all rows of a task are; each task has its rank."""

    def spoil(rows: list, judged: list, row: int) -> None:
        judged[row].reward = float("nan")

    algorithm = AlgorithmSpec(token_advantage="reinforce_plus_plus", token_advantage_args={"baseline": True})
    client = find_or_start_trainer(Home(tmp_path).cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=120)
    try:
        for row in (0, 4):  # of the first and the second task
            bad = round_request(groups=2, edit=partial(spoil, row=row), algorithm=algorithm)
            with pytest.raises(NonFiniteError, match="1 runs have a reward that is not finite, in rows"):
                client.train(bad)
        assert client.train(round_request(groups=2, algorithm=algorithm)).steps == 1
    finally:
        client.shutdown()


@pytest.mark.parametrize("once", [False, True], ids=["sums_per_pack", "sums_per_step"])
def test_two_ranks_train_and_resume_as_one_does(
    session: TrainingSession, round_request: Callable[..., TrainRequest], tmp_path: Path, once: bool
) -> None:
    """One step by its moments (Adam's exp_avg is a tenth of the gradient), the next ones by what they measured."""

    def alone(request: TrainRequest, output: str, events: list[StepEvent] | None = None) -> TrainResult:
        keep = (events if events is not None else []).append
        return session.train(replace(request, output=str(tmp_path / output)), keep, lambda: False)

    options = {"nproc": 2, "dtype": "float32", "device": "cpu", "idle_timeout_s": 120}
    client = find_or_start_trainer(Home(tmp_path).cluster, layout=Layout(reduce_once=once), **options)
    try:
        first = round_request(1, algorithm=PPO, optimizer=FREE, max_steps=1, train_batch_size=48)
        two, one = client.train(first), alone(first, "one")
        assert difference(moments(Path(two.checkpoint)), moments(Path(one.checkpoint))) <= 1e-6
        following = round_request(2, algorithm=PPO, optimizer=FREE, parent_version=1)
        pair, single = list[StepEvent](), list[StepEvent]()
        from_one = replace(following, parent=one.checkpoint, output=str(tmp_path / "pair"))
        straight = client.train(from_one, pair.append)
        alone(replace(following, parent=two.checkpoint), "single", single)
        assert len(pair) == len(single) == 3
        for a, b in zip(pair, single, strict=True):
            for name in SAME:
                assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=1e-4), name
        pid = client.status()["pid"]

        def kill(event: StepEvent) -> None:
            if event.step == 3:
                os.kill(pid, signal.SIGKILL)

        again = replace(from_one, output=str(tmp_path / "again"))
        with pytest.raises(TrainerError):
            client.train(again, kill)
        repeated = client.train(again)
        assert difference(weights(repeated), weights(straight)) <= 1e-6
        assert difference(moments(Path(repeated.checkpoint)), moments(Path(straight.checkpoint))) <= 1e-6
        assert len(psutil.Process(client.status()["pid"]).parent().children()) == 2
    finally:
        client.shutdown()
