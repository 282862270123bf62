"""Pairs, a mixture and a sharded teacher on two real ranks: the same steps as on one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec, OptimizerSpec
from rft_platform.config.home import Home
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import StepEvent, TrainRequest
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer
from tests.support.builders import preferences_file

pytestmark = pytest.mark.slow

ANSWERS = [(f"{a}+{b}=?", str(a + b)) for a, b in [(1, 2), (30, 4), (55, 6), (7, 80), (9, 9), (12, 1), (40, 8)]]
DPO = AlgorithmSpec(policy_loss="dpo", loss_agg_mode="seq-mean-token-sum")
KTO = AlgorithmSpec(policy_loss="kto", loss_agg_mode="seq-mean-token-sum")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerClient]:
    home = tmp_path_factory.mktemp("two_ranks")
    client = find_or_start_trainer(Home(home).cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=120)
    yield client
    client.shutdown()


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return preferences_file(tmp_path / "pairs.parquet", [(prompt, answer, f"{answer}1") for prompt, answer in ANSWERS])


@pytest.fixture
def demonstrations(tmp_path: Path) -> str:
    file = tmp_path / "demonstrations.parquet"
    pq.write_table(pa.table({"prompt": [p for p, _ in ANSWERS], "response": [a for _, a in ANSWERS]}), file)
    return str(file)


@pytest.mark.parametrize("kind", ["dpo", "dpo with an adapter", "kto", "gkd", "mix"])
def test_two_ranks_take_the_same_steps_as_one(
    two_ranks: TrainerClient, session: TrainingSession, round_request: Callable[..., TrainRequest], tiny_model: Path,
    pairs: str, demonstrations: str, tmp_path: Path, kind: str,
) -> None:  # fmt: skip
    """``max_steps`` 3 of 4 pairs each from 7 go into a second pass, whose reference log-probs are there already."""
    no_rollouts: dict[str, Any] = {"rollouts": (), "judged": (), "max_steps": 3, "train_batch_size": 4}
    fields: dict[str, Any] = {
        "dpo": {**no_rollouts, "algorithm": DPO, "preferences": pairs, "reference": str(tiny_model)},
        "dpo with an adapter": {**no_rollouts, "algorithm": DPO, "preferences": pairs, "lora": LoraSpec(rank=4)},
        "kto": {**no_rollouts, "algorithm": KTO, "preferences": pairs, "reference": str(tiny_model)},
        "gkd": {
            **no_rollouts,
            "algorithm": AlgorithmSpec(policy_loss="gkd"), "demonstrations": demonstrations, "teacher": str(tiny_model),
        },
        "mix": {"algorithm": AlgorithmSpec(policy_loss="mix", expert_weight=0.3), "demonstrations": demonstrations},
    }[kind]  # fmt: skip
    if kind == "gkd":  # a student that is not its teacher
        sft = round_request(**no_rollouts, algorithm=AlgorithmSpec(policy_loss="sft"), demonstrations=demonstrations)
        trained = session.train(replace(sft, output=str(tmp_path / "sft")), lambda event: None, lambda: False)
        fields |= {"parent": trained.checkpoint, "parent_version": 3}
    request = round_request(**fields, optimizer=OptimizerSpec(lr=1e-4))
    pair, single = list[StepEvent](), list[StepEvent]()
    two_ranks.train(request, pair.append)
    session.train(replace(request, output=str(tmp_path / "one")), single.append, lambda: False)
    assert len(pair) == len(single) == 3
    compared = {"loss", "grad_norm", "entropy", "pair_margin", "kl_baseline", "divergence", "expert_nll"}
    for a, b in zip(pair, single, strict=True):
        assert a.metrics["rows"] == b.metrics["rows"]
        for name in compared & b.metrics.keys():
            assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=2e-5), name
