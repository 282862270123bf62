"""A loss of the user that fails on one rank only: the group ends, and no rank waits for the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import TrainerError
from rft_platform.config.home import Home
from rft_platform.training.protocol import TrainRequest
from rft_platform.training.service.trainer_client import find_or_start_trainer

pytestmark = pytest.mark.slow

PLUGIN = """
import os

from rft_platform.algorithms.losses.registry import TokenLoss, loss
from rft_platform.common.errors import UserError


@loss("fails_on_one_rank")
def fails_on_one_rank(tokens):
    if os.environ["RANK"] == "{rank}":
        raise {error}("no logarithm of this row")
    return TokenLoss(-tokens.logp, {{}})
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("rank", "error"), [(0, "ValueError"), (0, "UserError"), (1, "UserError")])
def test_a_loss_that_fails_on_one_rank_ends_the_group(
    round_request: Callable[..., TrainRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: str
) -> None:
    (tmp_path / "one_rank_plugin.py").write_text(PLUGIN.format(rank=rank, error=error))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmSpec(policy_loss="fails_on_one_rank", plugins=("one_rank_plugin",))
    client = find_or_start_trainer(Home(tmp_path).cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=60)
    try:
        said = "no logarithm of this row" if rank == 0 else None  # of another rank's error only the log tells
        with pytest.raises(TrainerError, match=said):
            client.train(round_request(groups=2, algorithm=algorithm))
    finally:
        client.shutdown()
