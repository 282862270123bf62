"""Trainings that are killed and go on, on the same number of ranks and on another; real processes.

Adam turns float noise in near-zero gradients into visible steps. Runs on different numbers of ranks sum in different
orders, so they are compared under an ``eps`` well above that noise.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rft_platform.algorithms.spec import LoraSpec, OptimizerSpec
from rft_platform.cluster.interface import Group
from rft_platform.cluster.local.local_cluster import command_of
from rft_platform.common.errors import TrainerError, TrainingCancelled
from rft_platform.config.home import Home
from rft_platform.training.launch import trainer_service
from rft_platform.training.protocol import Layout, StepEvent
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer
from tests.training.conftest import whole_state

pytestmark = pytest.mark.slow
SMOOTH = OptimizerSpec(lr=1e-3, eps=1e-2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerClient]:
    """Two gloo ranks."""
    home = tmp_path_factory.mktemp("pair")
    client = find_or_start_trainer(Home(home).cluster, nproc=2, dtype="float32", device="cpu", idle_timeout_s=120)
    yield client
    client.shutdown()


def alone(session, request, stop_after: int | None = None):
    """Train in this process, on one rank."""
    seen: list[StepEvent] = []
    return session.train(request, seen.append, lambda: len(seen) == stop_after)


def assert_equal(one, other) -> None:
    for read in (weights, lambda result: whole_state(result.checkpoint)):
        a, b = read(one), read(other)
        assert a.keys() == b.keys() and a
        assert max(float(np.abs(a[name] - b[name]).max()) for name in a) <= 1e-6


def weights(result) -> dict[str, np.ndarray]:
    (file,) = Path(result.checkpoint).glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, alpha=8)], ids=["full", "lora"])
def test_a_training_continues_on_two_ranks_after_one(pair, session, round_request, tmp_path, lora) -> None:
    request = round_request(epochs=2, save_interval=1, optimizer=SMOOTH, lora=lora)
    with pytest.raises(TrainingCancelled):
        alone(session, request, stop_after=int(np.random.default_rng().integers(2, 6)))
    result = pair.train(request)
    shards = sorted(file.name for file in Path(result.checkpoint, "trainer_state").glob("optimizer*"))
    assert shards == ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]
    assert_equal(result, alone(session, replace(request, output=str(tmp_path / "straight"))))


def test_killed_on_two_ranks_and_ended_on_one(pair, session, round_request, tmp_path) -> None:
    request = round_request(epochs=2, save_interval=1, optimizer=SMOOTH)
    pid, at = pair.status()["pid"], int(np.random.default_rng().integers(3, 6))

    def kill(event: StepEvent) -> None:
        if event.step == at:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainerError, match="ended during 'train'"):
        pair.train(request, kill)
    folder = Path(request.output, "intermediate")
    # A save of two steps ago may still have been on its way to the disk when the next step ended.
    assert {path.name for path in folder.glob("step_*")} & {f"step_{at - back}" for back in range(3)}
    steps: list[StepEvent] = []
    result = session.train(request, steps.append, lambda: False)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert not folder.exists()  # with what the killed writer left in it
    straight = replace(request, output=str(tmp_path / "straight"))
    assert_equal(result, alone(session, straight))
    with pytest.raises(AssertionError):  # and it was no cold start: that ends elsewhere
        assert_equal(result, alone(session, replace(request, seed=8, output=str(tmp_path / "other"))))


def test_two_nodes_meet_at_an_endpoint(round_request, session, tmp_path) -> None:
    """Both on this machine: one started by the control plane, one as ``join`` does; activations are computed again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Group(1, 2, f"127.0.0.1:{probe.getsockname()[1]}", timeout_s=60.0)
    layout = Layout(gradient_checkpointing=True)
    service = trainer_service(dtype="float32", device="cpu", idle_timeout_s=120.0, layout=layout, group=meeting)
    further = subprocess.Popen(
        command_of(service, node_rank=1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        client = find_or_start_trainer(
            Home(tmp_path / "a").cluster, dtype="float32", device="cpu", idle_timeout_s=120, layout=layout,
            group=meeting,
        )  # fmt: skip
        try:
            assert client.status()["world_size"] == 2
            request = round_request(optimizer=SMOOTH)
            result = client.train(request)
        finally:
            client.shutdown()
        assert further.wait(timeout=30) == 0
    finally:
        if further.poll() is None:
            os.killpg(further.pid, signal.SIGKILL)
            further.wait()
    assert_equal(result, alone(session, replace(request, output=str(tmp_path / "one"))))
