"""Hundreds of runs at once with faults of every kind: the batch ends, and everything is accounted for."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.config.home import Home
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.inference.launch.pool_start import find_or_start_pool
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, resolve_workflow
from rft_platform.tasks.task import Task

from . import faulty_agents
from .faulty_proxy import FaultyProxy
from .samples import roll_out

pytestmark = pytest.mark.slow
AGENT = f"{faulty_agents.__name__}:agent"
REPEATS = 4
LIMIT_S = 40.0  # all runs share two engines, one of which starts again meanwhile: beside other tests that takes 30 s


def tasks(count: int, faults: dict[str, int], folder: Path, seed: int = 0) -> list[Task]:
    """Tasks among whose runs so many faults of each kind are spread."""
    chance, plan = random.Random(seed), Counter[int]()
    kinds: dict[int, list[str]] = {n: [] for n in range(count)}
    for kind, times in faults.items():
        for _ in range(times):
            kinds[min(chance.sample(range(count), 3), key=lambda n: plan[n])].append(kind)
    rows = [{"marker": f"m{n}x", "faults": kinds[n], "folder": str(folder)} for n in range(count)]
    return [Task(f"task-{n}", "set", row["marker"], None, row) for n, row in enumerate(rows)]


def explore(engine: PolicyEngine, workflow: Workflow, given: list[Task], **options: Any) -> RolloutBatch:
    settings: dict[str, Any] = {
        "round": 1,
        "batch": 0,
        "repeat_times": REPEATS,
        "sampling": SamplingParams(4),
        **options,
    }
    return roll_out(engine, given, workflow, **settings)


def assert_sound(batch: RolloutBatch, given: list[Task]) -> None:
    """Every group whole, no run with another's messages, and counts that add up."""
    report, runs = batch.report, {row.run_id: row.group_id for row in batch.rows}
    assert report.runs == len(given) * REPEATS
    assert set(Counter(runs.values()).values()) == {REPEATS}
    assert len(set(runs.values())) + report.dropped_groups == len(given)
    assert report.rows == len(batch.rows) == 2 * len(runs)
    assert sum(report.dropped_for.values()) == report.dropped_groups
    assert sum(report.errors.values()) == report.retried + report.failed
    assert len({row.row_id for row in batch.rows}) == len(batch.rows)
    marker = {task.task_id: task.raw["marker"] for task in given}
    for row in batch.rows:
        own = marker[row.task_id]
        said = [message["content"] for message in row.messages if message["role"] == "user"]
        assert said == [f"{own} first", f"{own} second"][: row.step + 1]
        assert row.run_output is None or row.run_output == [own, row.response.get("content")]
    for first, second in zip(batch.rows[::2], batch.rows[1::2], strict=True):  # its own first answer, no other run's
        assert second.messages[1].get("content") == first.response.get("content")


class Fire:
    """Whether a request is answered with 500 now, in place of the engine: every so-manieth is."""

    def __init__(self) -> None:
        self._one_in = self._requests = 0

    def __call__(self) -> bool:
        self._requests += 1
        return self._one_in > 0 and self._requests % self._one_in == 0

    @contextmanager
    def one_in(self, requests: int) -> Iterator[None]:
        """Answer one of so many requests with 500 within the block."""
        self._one_in, self._requests = requests, 0
        try:
            yield
        finally:
            self._one_in = 0
        assert self._requests > 3 * requests


@pytest.fixture(scope="module")
def fire() -> Fire:
    return Fire()


@pytest.fixture(scope="module")
def pool(fire: Fire, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Two engine processes used as one; the data plane of each lies behind a proxy."""
    home, proxies = tmp_path_factory.mktemp("fire"), []

    def connect(replica: int) -> EngineClient:
        client = find_or_start_engine(
            tiny_model,
            Home(home).cluster,
            EngineSpec(dtype="float32", device="cpu"),
            replica=replica,
        )
        host, port = client.url.removeprefix("http://").split(":")
        proxies.append(FaultyProxy((host, int(port)), fire))
        proxy = f"http://127.0.0.1:{proxies[-1].port}"
        client.address = replace(client.address, url=proxy)  # its control plane is connected already
        return client

    with find_or_start_pool(2, connect) as pool:
        yield pool
        pool.shutdown()
    for proxy in proxies:
        proxy.close()


def kill_one(pool: EnginePool, after_requests: int) -> threading.Thread:
    """Kill a replica -9 once it has answered so many requests from now on."""
    victim = pool.replicas.serving()[0]
    pid, before = victim.client.status().pid, victim.client.metrics()["requests"]

    def watch() -> None:
        deadline = time.monotonic() + 60
        while victim.client.metrics()["requests"] < before + after_requests and time.monotonic() < deadline:
            time.sleep(0.01)
        psutil.Process(pid).kill()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_three_hundred_runs_with_faults_of_every_kind(pool: EnginePool, fire: Fire, tmp_path: Path) -> None:
    given = tasks(75, {"raise": 15, "hang": 15}, tmp_path)
    killing = kill_one(pool, 40)
    with fire.one_in(20):
        batch = explore(pool, resolve_workflow(AGENT), given, concurrency=300, timeout_s=LIMIT_S, max_retries=2)
    killing.join()
    assert_sound(batch, given)
    assert batch.report.failed == 0 and batch.report.dropped_groups == 0
    assert batch.report.errors["RuntimeError: the tool broke"] == 15
    assert batch.report.errors[f"TimeoutError: no result within {LIMIT_S:.0f} s"] >= 15
    assert batch.report.client_retries > 0


def test_worker_processes_under_fire(pool: EnginePool, fire: Fire, tmp_path: Path) -> None:
    before = descendants()
    deadline = time.monotonic() + 60
    while pool.replicas.down() and time.monotonic() < deadline:
        time.sleep(0.05)
    given = tasks(6, {"raise": 2, "hang": 1, "block": 1}, tmp_path)
    killing = kill_one(pool, 8)
    workflow = WorkerWorkflow(AGENT, count=3)
    with fire.one_in(10):
        batch = explore(pool, workflow, given, concurrency=3, timeout_s=5.0, max_retries=2)
    killing.join()
    assert_sound(batch, given)
    assert batch.report.failed == 0
    assert batch.report.errors["RuntimeError: the tool broke"] == 2
    left = [psutil.Process(pid) for pid in descendants() - before if psutil.pid_exists(pid)]
    assert not [process for process in left if "rft_platform.rollout.workers.worker" in process.cmdline()]
