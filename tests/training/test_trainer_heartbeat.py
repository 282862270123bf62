"""A trainer that is stopped, not dead: it is noticed by its missing heartbeat, ended, and the request made again."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.cluster.local.processes import find_process
from rft_platform.cluster.local.service_process import ServiceProcess
from rft_platform.common.errors import TrainerError
from rft_platform.config.home import Home
from rft_platform.training.protocol import HEARTBEAT, PREFIX
from rft_platform.training.service import command_server
from rft_platform.training.service.command_server import CommandServer
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer

LIMIT_S = 6.0  # three heartbeats: a stopped trainer is found soon


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def client(home: Path) -> Iterator[TrainerClient]:
    client = find_or_start_trainer(
        Home(home).cluster,
        dtype="float32",
        device="cpu",
        idle_timeout_s=300,
        heartbeat_timeout_s=LIMIT_S,
    )
    yield client
    client.shutdown()


def stop(pid: int) -> None:
    """Stop the process; return when it does not run any more (on a loaded machine the signal takes effect later)."""
    os.kill(pid, signal.SIGSTOP)
    process, limit = psutil.Process(pid), time.monotonic() + 30
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_ended_and_the_same_request_gives_the_same_weights(
    client, home, session, round_request, tmp_path
) -> None:
    request = round_request(seed=3)
    pid = client.status()["pid"]
    created = psutil.Process(pid).create_time()

    def stop_in_step_1(event) -> None:
        if event.step == 1:
            stop(pid)

    began = time.monotonic()
    with pytest.raises(TrainerError, match=f"pid {pid}.* sent no heartbeat for 6 s during 'train'") as failure:
        client.train(request, stop_in_step_1)
    assert failure.value.retryable
    assert time.monotonic() - began < 60
    assert find_process(pid, created) is None
    assert read_lease(home / "leases" / "trainer.json") is None
    repeated = client.train(request)
    straight = session.train(
        round_request(seed=3, output=str(tmp_path / "straight")), lambda event: None, lambda: False
    )
    assert repeated.weights_digest == straight.weights_digest
    assert load_file(Path(repeated.checkpoint) / "model.safetensors").keys()


@pytest.mark.slow
def test_a_trainer_that_is_stopped_before_the_request_is_replaced_at_once(client, round_request) -> None:
    pid = client.status()["pid"]
    stop(pid)
    assert client.train(round_request(seed=4)).steps > 0
    assert client.status()["pid"] != pid


@pytest.mark.slow
def test_a_stopped_trainer_does_not_hold_up_status_cancel_and_shutdown(client) -> None:
    pid = client.status()["pid"]
    created = psutil.Process(pid).create_time()
    stop(pid)
    began = time.monotonic()
    with pytest.raises(TrainerError, match="did not answer 'cancel' within 10 s"):
        client.cancel()
    client.shutdown()
    assert time.monotonic() - began < 45
    assert find_process(pid, created) is None  # torchrun may not have reaped the killed rank yet


def test_heartbeats_come_while_a_command_waits_and_while_it_runs(monkeypatch) -> None:
    monkeypatch.setattr(command_server, "HEARTBEAT_S", 0.05)
    beats = threading.Event()
    beats.set()
    server = CommandServer(ServiceProcess("trainer", Path("trainer.json"), token="secret"), dict, beats.is_set)
    url, headers = f"http://127.0.0.1:{server.port}{PREFIX}train", {"Authorization": "Bearer secret"}
    try:
        with httpx.stream("POST", url, headers=headers, timeout=2) as response:
            events = map(json.loads, response.iter_lines())
            assert next(events) == {"event": "accepted"}
            assert next(events) == {"event": HEARTBEAT}  # the command waits
            job = server.next_job()
            assert job is not None
            assert next(events) == {"event": HEARTBEAT}  # the command runs
            beats.clear()  # another rank is stopped: nothing goes on
            with pytest.raises(httpx.ReadTimeout):
                while next(events) == {"event": HEARTBEAT}:
                    pass
    finally:
        server.close()
