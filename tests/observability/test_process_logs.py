"""Engine and trainer, real processes, log for the round and run that their caller works for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.cluster.local.leases import read_lease
from rft_platform.common.errors import RftError
from rft_platform.config.home import Home
from rft_platform.inference.client import EngineClient
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.observability.logs import phase_context
from rft_platform.training.protocol import TrainRequest
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for leases and logs; processes that start from here on write JSON lines."""
    monkeypatch.setenv("RFT_LOG_FORMAT", "json")
    return tmp_path


@pytest.fixture
def engine(home: Path, tiny_model: Path) -> Iterator[EngineClient]:
    with find_or_start_engine(tiny_model, Home(home).cluster, EngineSpec(dtype="float32", device="cpu")) as client:
        yield client
        client.shutdown()


@pytest.fixture
def trainer(home: Path) -> Iterator[TrainerClient]:
    client = find_or_start_trainer(Home(home).cluster)
    yield client
    client.shutdown()


def lines_of(log: Path, text: str) -> list[dict[str, Any]]:
    """The JSON lines of a log whose message holds ``text``; every line has to be one."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if text in line["message"]]


@pytest.mark.slow
def test_the_engine_logs_the_round_of_a_weight_update(home: Path, tiny_model: Path, engine: EngineClient) -> None:
    with phase_context(5, "run-5", "evaluation_report"):
        engine.update_weights(tiny_model, 3)
    (line,) = lines_of(home / "logs" / "engine.log", "serves policy version 3")
    assert (line["process"], line["level"]) == ("engine", "INFO")
    assert (line["round"], line["run_id"], line["phase"]) == ("r0005", "run-5", "evaluation_report")
    lease = read_lease(home / "leases" / "engine.json")
    assert lease is not None
    assert lease.token not in (home / "logs" / "engine.log").read_text()


@pytest.mark.slow
def test_the_error_of_the_trainer_names_the_round(home: Path, trainer: TrainerClient) -> None:
    request = TrainRequest(
        parent="/no/such/checkpoint", parent_version=0, output=str(home), rollouts=("none.parquet",),
        judged=("none.parquet",), algorithm=AlgorithmSpec(), optimizer=OptimizerSpec(),
    )  # fmt: skip
    with pytest.raises(RftError), phase_context(6, "run-6", "policy_checkpoint"):
        trainer.train(request)
    (line,) = lines_of(home / "logs" / "trainer.log", "train failed")
    assert (line["process"], line["level"]) == ("trainer", "WARNING")
    assert (line["round"], line["run_id"], line["phase"]) == ("r0006", "run-6", "policy_checkpoint")
