"""The trainer group as real processes: killed, repeated, cancelled, restarted; two ranks against one."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from rft_platform.algorithms.spec import OptimizerSpec
from rft_platform.cluster.local.leases import read_lease
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.common.errors import TrainerError, TrainingCancelled, UserError
from rft_platform.config.home import Home
from rft_platform.training.launch import TRAINER, trainer_service
from rft_platform.training.protocol import StepEvent, TrainResult
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer
from tests.training.conftest import whole_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[TrainerClient]:
    client = find_or_start_trainer(Home(home).cluster, dtype="float32", device="cpu", idle_timeout_s=120)
    yield client
    client.shutdown()


def trainer_state(result: TrainResult) -> dict[str, np.ndarray]:
    return whole_state(result.checkpoint)


def weights(result: TrainResult) -> dict[str, np.ndarray]:
    return load_file(Path(result.checkpoint) / "model.safetensors")


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_killed_in_the_middle_and_repeated(client, session, round_request, tmp_path) -> None:
    def nothing(event: StepEvent) -> None: ...

    first, second = round_request(seed=1), round_request(seed=2)
    start = client.train(first)

    def go_on(output: str, **changes):
        settings = {"parent": start.checkpoint, "parent_version": 3, "output": str(tmp_path / output)} | changes
        return replace(second, **settings)

    straight = session.train(go_on("straight"), nothing, lambda: False)
    pid = client.status()["pid"]

    def kill(event: StepEvent) -> None:
        if event.step == 5:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainerError, match=r"ended during 'train'(?s:.*)Last lines of .*trainer.log") as failure:
        client.train(go_on("killed"), kill)
    assert failure.value.retryable
    assert not (tmp_path / "killed").exists()
    repeated = client.train(go_on("killed"))  # finds the group dead and starts it again
    assert client.status()["pid"] != pid
    assert largest_difference(weights(repeated), weights(straight)) <= 1e-6
    assert largest_difference(trainer_state(repeated), trainer_state(straight)) <= 1e-6
    cold = session.train(go_on("cold", fresh_optimizer=True), nothing, lambda: False)
    assert largest_difference(weights(cold), weights(straight)) > 1e-4
    assert client.score([[5, 6, 7]])[0] == pytest.approx(score_after(session, go_on("straight")), abs=1e-6)


def score_after(session, request) -> list[float]:
    session.train(request, lambda event: None, lambda: False)  # answered from the store, and held
    return session.score([[5, 6, 7]])[0]


def test_cancelled_from_a_second_connection(client, round_request) -> None:
    request = round_request(epochs=50)
    answers = []
    with pytest.raises(TrainingCancelled):
        client.train(request, lambda event: answers.append(client.cancel()) if event.step == 1 else None)
    assert answers == [True]
    assert client.cancel() is False
    assert not Path(request.output).exists()


def test_errors_arrive_as_what_they_are_and_the_group_lives_on(client, round_request) -> None:
    pid = client.status()["pid"]
    with pytest.raises(UserError, match="model folder /nowhere does not exist"):
        client.train(round_request(parent="/nowhere"))
    with pytest.raises(UserError, match=r"not a training request: (?s:.*)train_batch_size"):
        client.train(round_request(train_batch_size="many"))
    status = client.status()
    assert (status["pid"], status["device"], status["world_size"], status["busy"]) == (pid, "cpu", 1, False)
    assert status["cpu_seconds"] > 0 and status["peak_rss_mb"] > 100


def test_an_idle_group_is_found_and_the_lease_is_private(client, home) -> None:
    again = find_or_start_trainer(Home(home).cluster, dtype="float32", device="cpu", idle_timeout_s=120)
    assert again.status()["pid"] == client.status()["pid"]
    lease = home / "leases" / "trainer.json"
    assert lease.stat().st_mode & 0o777 == 0o600
    assert read_lease(lease).token not in (home / "logs" / "trainer.log").read_text()


def test_two_ranks_take_the_same_step_as_one(session, round_request, tmp_path) -> None:
    """Compared by moments after one step (Adam's exp_avg is the gradient times 0.1) and by loss and norm of three."""
    client = find_or_start_trainer(Home(tmp_path).cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=120)
    try:
        one_step = round_request(max_steps=1, optimizer=OptimizerSpec(lr=1e-3, clip_grad=1e9))
        two = client.train(one_step)
        one = session.train(replace(one_step, output=str(tmp_path / "one")), lambda event: None, lambda: False)
        assert largest_difference(trainer_state(two), trainer_state(one)) <= 1e-6
        following = round_request(seed=2, parent=two.checkpoint, parent_version=1, output=str(tmp_path / "two"))
        client.score([[5, 6, 7]])  # a forward pass alone leaves gathered copies in FSDP's root: embedding and last norm
        pair, single = list[StepEvent](), list[StepEvent]()
        before, after = weights(two), weights(client.train(following, pair.append))
        assert [name for name in before if np.array_equal(before[name], after[name])] == []
        session.train(replace(following, output=str(tmp_path / "one")), single.append, lambda: False)  # saved by two
        for a, b in zip(pair, single, strict=True):
            assert a.metrics["tokens"] == b.metrics["tokens"]
            for name in ("loss", "grad_norm", "entropy", "mismatch_k3"):
                assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-4, abs=1e-5)
        ranks = psutil.Process(client.status()["pid"]).parent().children()
        assert len(ranks) == 2
    finally:
        client.shutdown()
    assert wait_until_ended(ranks, 0) == []


def test_a_group_sees_only_its_devices_and_others_replace_it(tmp_path) -> None:
    cluster = Home(tmp_path).cluster
    options = {"dtype": "float32", "device": "cpu", "idle_timeout_s": 120}
    one, two = (TrainerClient(cluster, trainer_service(gpus=gpus, **options)) for gpus in ("1,3", "2,3"))
    try:
        one.ensure_running()
        first = cluster.find(TRAINER)
        assert first is not None
        assert psutil.Process(first.details["pid"]).environ()["CUDA_VISIBLE_DEVICES"] == "1,3"
        one.ensure_running()
        assert cluster.find(TRAINER) == first
        two.ensure_running()
        second = cluster.find(TRAINER)
        assert second is not None and second.generation == 2
        assert psutil.Process(second.details["pid"]).environ()["CUDA_VISIBLE_DEVICES"] == "2,3"
    finally:
        two.shutdown()


def test_a_group_that_cannot_start_shows_its_log(tmp_path) -> None:
    with pytest.raises(TrainerError, match=r"(?s)exit code 2.*dtype 'float8': expected one of auto, float32, bfloat16"):
        find_or_start_trainer(Home(tmp_path).cluster, dtype="float8", device="cpu")
