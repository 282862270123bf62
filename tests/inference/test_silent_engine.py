"""An engine that is stopped while a batch runs is ended; the request answers, or fails with a retryable error."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rft_platform.cluster.interface import Address
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.common.errors import EngineError
from rft_platform.config.home import Home
from rft_platform.inference import client as engine_client
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine

pytestmark = pytest.mark.slow


def test_a_stopped_engine_is_ended_and_replaced(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine_client, "PROBE_INTERVAL_S", 0.5)
    start = (tiny_model, Home(tmp_path).cluster)
    with find_or_start_engine(*start, EngineSpec(dtype="float32", device="cpu", heartbeat_timeout_s=3.0)) as engine:
        pid = engine.status().pid
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with suppress(EngineError):  # or it answers, continued to end in order
            engine.score([[5, 6, 7]])
        assert time.monotonic() - began < 40
        assert wait_until_ended([process], 20) == []
    with find_or_start_engine(*start, EngineSpec(dtype="float32", device="cpu")) as engine:
        assert engine.status().pid != pid
        assert len(engine.score([[5, 6, 7]])[0]) == 3
        engine.shutdown()


def test_an_engine_that_has_ended_needs_no_shutdown(tiny_model: Path, tmp_path: Path) -> None:
    start = (tiny_model, Home(tmp_path).cluster)
    with find_or_start_engine(*start, EngineSpec(dtype="float32", device="cpu")) as engine:
        process = psutil.Process(engine.status().pid)
        process.kill()
        assert wait_until_ended([process], 20) == []
        engine.shutdown()


def test_an_engine_that_the_cluster_does_not_find_once_is_still_watched(monkeypatch) -> None:
    """On a cluster the answer may be late; and a node that lost its network ends no connection."""
    monkeypatch.setattr(engine_client, "PROBE_INTERVAL_S", 0.01)
    address = Address("engine", "http://127.0.0.1:1", "", 3, "", {"pid": 1})
    found, stopped = iter([None, address, None]), []

    class Silent:
        def find(self, name: str) -> Address | None:
            return next(found, address)

        def answers(self, given: Address) -> bool:
            return False

        def stop(self, name: str, grace_s: float, *, generation: int) -> None:
            stopped.append((name, generation))

    engine_client._end_if_silent(Silent(), address, threading.Event(), limit_s=0.1)  # type: ignore[arg-type]
    assert stopped == [("engine", 3)]
