"""How a pool shares work out, without any process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import EngineError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import EngineStatus, Generation, PartialBatch, SamplingParams
from rft_platform.inference.launch.pool_start import engine_devices, find_or_start_pool
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.inference.pool.replicas import PROBE_AFTER_S, ROWS_A_SHARE, Replica, Replicas, level, partition


def replicas(count: int) -> Replicas:
    return Replicas([Replica(n, EngineClient(f"http://127.0.0.1:{9000 + n}")) for n in range(count)], {})


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60),
    st.integers(1, 16),
    st.lists(st.integers(0, 5000), min_size=1, max_size=6).map(sorted),
)
def test_shares_cover_the_batch_in_order_and_are_balanced(costs: list[int], rows: int, loads: list[int]) -> None:
    shares = partition(costs, rows, loads)
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == len(costs) and len(shares) <= len(loads)
    assert [share.cost for share in shares] == [sum(costs[share.start : share.stop]) for share in shares]
    assert all(share.stop > share.start for share in shares)
    if len(shares) > 1:
        assert len(costs) * rows >= ROWS_A_SHARE * len(shares)
        wanted = level(sum(costs), loads[: max(1, min(len(loads), len(costs), len(costs) * rows // ROWS_A_SHARE))])
        if len(wanted) == len(shares):  # no share came out empty: each boundary lies as near as items permit
            for share, amount in zip(shares, wanted, strict=True):
                assert abs(share.cost - amount) <= max(costs)


def test_a_small_batch_is_not_split_and_a_busy_replica_gets_less() -> None:
    assert len(partition([100, 100], 2, [0, 0])) == 1
    first, second = partition([10] * 100, 1, [0, 500])
    assert (first.cost, second.cost) == (750, 250)
    (alone,) = partition([10] * 100, 1, [0, 5000])
    assert alone.cost == 1000


def test_equal_replicas_take_turns_and_the_least_loaded_comes_first() -> None:
    table = replicas(3)
    assert [table.take(10).number for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    first, _, third = table.serving()
    table.release(third, 10)
    assert table.take(10).number == 2
    table.release(first, 20)
    assert [table.take(10).number for _ in range(2)] == [0, 0]


def test_a_run_stays_until_its_replica_is_clearly_busier() -> None:
    table = replicas(2)
    home = table.take(10)
    assert [table.take(10, home).number for _ in range(2)] == [0, 0]
    assert table.take(10, home).number == 1, "three requests wait there, none elsewhere"
    table.mark_down(home, "gone")
    assert table.take(10, home).number == 1


def test_a_late_report_about_a_replaced_process_is_ignored() -> None:
    table = replicas(2)
    heard: list[int] = []
    table.on_down = heard.append
    old = table.serving()[1]
    table.mark_down(old, "it does not answer")
    table.mark_down(old, "again")
    assert (table.down(), heard) == ({1: "it does not answer"}, [1])
    table.join(Replica(1, EngineClient("http://127.0.0.1:9009")))
    table.mark_down(old, "a late report")
    assert table.down() == {} and [replica.url[-4:] for replica in table.serving()] == ["9000", "9009"]


def test_an_idle_replica_is_probed() -> None:
    table = replicas(2)
    heard: list[int] = []
    table.on_idle = lambda replica: heard.append(replica.number)
    home = table.take(1)
    assert heard == []
    table.serving()[1].used_at -= 2 * PROBE_AFTER_S
    for _ in range(3):
        table.release(table.take(1, home), 1)
    assert heard == [1]


@dataclass
class Counting(EngineClient):
    """A client of a process that is the first of its container."""

    name: str
    requests: float
    started_at: float = 0.0
    probes: int = 0  # calls of ``score``, which wake an engine that sleeps

    def __post_init__(self) -> None:
        super().__init__(f"http://{self.name}:8100")

    def status(self) -> EngineStatus:
        """That of a process which was as long at work as it has requests."""
        return EngineStatus(
            "sums 1", "sums", 0, "w", "t", False, "float32", 64, 1, self.requests, started_at=self.started_at
        )

    def metrics(self) -> dict[str, float]:
        """The number of requests."""
        return {"requests": self.requests}

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """No prompts, because the process has no model."""
        return []

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """No log-probs."""
        self.probes += 1
        return []

    def fetch_weights(self, folder: Path) -> None:
        """Does nothing, because the process sees all folders."""

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Does nothing, because the process has no model."""

    def generate(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> list[Generation]:
        """No choice for each prompt."""
        return [Generation(prompt, [], 0) for prompt in prompts]


def test_counters_of_processes_with_the_same_id_are_added() -> None:
    first, second = Counting("engine-0", 10.0), Counting("engine-1", 20.0)
    clients: dict[int, EngineClient] = {0: first, 1: second}
    pool = EnginePool(clients, start=lambda number: clients[number])
    assert pool.metrics() == {"requests": 30.0} and pool.status().cpu_seconds == 30.0
    second.requests, second.started_at = 5.0, 60.0  # the container was restarted
    assert pool.metrics() == {"requests": 35.0} and pool.status().cpu_seconds == 35.0
    second.requests = 6.0
    assert pool.metrics() == {"requests": 36.0}


def test_a_pool_scores_before_the_replicas_work_and_not_for_their_status(tmp_path: Path) -> None:
    client = Counting("engine-0", 1.0)
    pool = EnginePool({0: client}, start=lambda number: client)
    pool.status()
    pool.metrics()
    assert client.probes == 0
    for _ in range(2):
        pool.generate([[1, 2]], SamplingParams(4))
        assert client.probes == 1
    pool.update_weights(tmp_path, 1)
    assert client.probes == 2


def test_the_error_names_every_replica_if_none_is_left() -> None:
    table = replicas(2)
    for replica in table.serving():
        table.mark_down(replica, f"fault {replica.number}")
    with pytest.raises(EngineError, match="replica 0: fault 0; replica 1: fault 1"):
        table.take(1)
    with pytest.raises(EngineError, match="replica 0: fault 0; replica 1: fault 1"):
        table.partition([1], 1)


def test_replicas_that_share_a_gpu_start_one_after_the_other() -> None:
    running: list[int] = []
    together: list[set[int]] = []

    def start(number: int) -> EngineClient:
        running.append(number)
        together.append(set(running))
        time.sleep(0.05)
        running.remove(number)
        raise EngineError(f"replica {number} is not started in this test")

    with pytest.raises(EngineError, match="replica 4"):
        find_or_start_pool(5, start, engines_per_gpu=2)
    for first in (0, 2):
        assert not any({first, first + 1} <= started for started in together)
    assert any(len(started) > 1 for started in together)  # those of different GPUs start together


def test_each_replica_has_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [engine_devices(range(first, first + 2)) for first in (0, 2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3,GPU-1")
    assert [engine_devices(range(number, number + 1)) for number in range(3)] == ["5", "3", "GPU-1"]
    with pytest.raises(Exception, match="engine_num"):
        engine_devices(range(2, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert engine_devices(range(1, 2)) == ""


@dataclass
class PausingClient:
    """A client of an engine that pauses, or refuses to."""

    url: str
    refuses: bool = False
    paused: bool = False

    def status(self) -> None: ...

    def pause(self, mode: str) -> None:
        if self.refuses:
            raise EngineError("pause refused (500)")
        self.paused = True

    def resume(self) -> None:
        self.paused = False


def test_a_pause_that_one_replica_refuses_pauses_none() -> None:
    clients: Any = {0: PausingClient("http://a"), 1: PausingClient("http://b", refuses=True)}
    pool = EnginePool(clients, start=clients.__getitem__)
    with pytest.raises(EngineError, match="pause refused"):
        pool.pause("wait")
    assert not clients[0].paused
    clients[1].refuses = False
    pool.pause("wait")
    assert clients[0].paused and clients[1].paused
