"""Two real engine processes as one engine: kills, refusals, load, interruption."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.cluster.interface import Cluster
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import EngineError, WeightMismatchError
from rft_platform.config.home import Home
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.canary import Canary, mean_difference, update_checked
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import Generation, PolicyEngine, SamplingParams
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.inference.launch.pool_start import find_or_start_pool
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.inference.pool.weights import PoolWeights
from rft_platform.recipes.tiny_model import build_model
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.rounds.project.policy import deploy
from rft_platform.rounds.project.record import Policy
from rft_platform.tasks.task import Task

pytestmark = pytest.mark.slow
PROMPTS = [[1, 292, 201, 40 + i % 20, *range(60, 60 + i % 7), 2, 201] for i in range(48)]
SAMPLING = SamplingParams(48, n=4, seed=11)
Start = Callable[[int], EngineClient]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Home(tmp_path_factory.mktemp("pool")).cluster


@pytest.fixture(scope="module")
def start(tiny_model: Path, cluster: Cluster) -> Start:
    """Finds or starts a replica."""

    def connect(replica: int) -> EngineClient:
        return find_or_start_engine(
            tiny_model,
            cluster,
            EngineSpec(dtype="float32", device="cpu"),
            replica=replica,
        )

    return connect


@pytest.fixture(scope="module")
def shared(start: Start) -> Iterator[EnginePool]:
    """The two processes that all tests use; a test that kills one waits until it is back."""
    with find_or_start_pool(2, start) as pool:
        yield pool
        pool.shutdown()


@pytest.fixture
def pool(shared: EnginePool, tiny_model: Path) -> Iterator[EnginePool]:
    """The pool, whole, with its first weights; it is so again afterwards."""
    yield shared
    wait_until(lambda: not shared.replicas.down())
    shared.update_weights(tiny_model, 0)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other numbers in it."""
    return build_model(tmp_path_factory.mktemp("model") / "other", seed=5)


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def kill(replica_pid: int) -> None:
    process = psutil.Process(replica_pid)
    process.kill()
    process.wait(10)


@contextmanager
def killed_at_work(pool: EnginePool, number: int) -> Iterator[list[int]]:
    """Kill a replica as soon as it works on something in the block; the pids killed."""
    (replica,) = (each for each in pool.replicas.serving() if each.number == number)
    pid, before = replica.client.status().pid, replica.client.metrics()["generate_seconds"]
    killed: list[int] = []

    def watch() -> None:
        wait_until(lambda: replica.client.metrics()["generate_seconds"] > before)
        kill(pid)
        killed.append(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    yield killed
    thread.join()


def tokens(generations: list[Generation]) -> list[tuple[list[int], list[list[int]]]]:
    return [(g.prompt_ids, [completion.token_ids for completion in g.completions]) for g in generations]


def tasks(count: int) -> list[Task]:
    return [Task(f"task-{n}", "set", f"{n} + {n} =", str(2 * n), {"question": f"{n} + {n} ="}) for n in range(count)]


async def two_turns(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    answer = await model.chat(messages)
    messages += [answer, {"role": "user", "content": "Are you sure?"}]
    return WorkflowOutput(response=(await model.chat(messages))["content"])


def explore(engine: PolicyEngine, count: int = 12, **options: Any) -> RolloutBatch:
    settings: dict[str, Any] = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(24), **options}
    return run_rollouts(engine, tasks(count), two_turns, **settings)


def test_a_batch_is_sampled_as_by_one_engine(pool: EnginePool, policy_engine: PolicyEngine) -> None:
    before = {replica.number: replica.client.metrics() for replica in pool.replicas.serving()}
    assert tokens(pool.generate(PROMPTS, SAMPLING)) == tokens(policy_engine.generate(PROMPTS, SAMPLING))
    sampled = [
        replica.client.metrics()["completion_tokens"] - before[replica.number]["completion_tokens"]
        for replica in pool.replicas.serving()
    ]
    assert max(sampled) < 1.25 * min(sampled), "the batch was not shared evenly"
    assert [replica.outstanding for replica in pool.replicas.serving()] == [0, 0]


def test_a_replica_killed_while_it_samples_loses_nothing(pool: EnginePool, policy_engine: PolicyEngine) -> None:
    with killed_at_work(pool, 0) as killed:
        generations = pool.generate(PROMPTS, SAMPLING)
    assert tokens(generations) == tokens(policy_engine.generate(PROMPTS, SAMPLING))
    wait_until(lambda: not pool.replicas.down())
    assert killed[0] not in {replica.client.status().pid for replica in pool.replicas.serving()}
    assert len(pool.replicas.serving()) == 2


def test_a_replica_killed_under_agents_loses_and_doubles_no_row(pool: EnginePool, policy_engine: PolicyEngine) -> None:
    with killed_at_work(pool, 1):
        batch = explore(pool)
    rows = {row.row_id: row for row in batch.rows}
    assert len(batch.rows) == len(rows) == 12 * 2 * 2
    report = batch.report
    assert (report.failed, report.retried, report.client_retries, report.errors) == (0, 0, 0, {})
    assert report.completion_tokens == sum(len(row.response_ids) for row in batch.rows)
    assert report.engine_cpu_s > 0
    for row in explore(policy_engine).rows:  # a request that moved was answered as it would have been
        assert rows[row.row_id].response_ids == row.response_ids


def test_agents_are_spread_evenly_and_stay_where_they_began(pool: EnginePool) -> None:
    before = [replica.client.metrics()["requests"] for replica in pool.replicas.serving()]
    explore(pool, 20, limits=RolloutLimits(concurrency=8))
    after = [replica.client.metrics()["requests"] for replica in pool.replicas.serving()]
    asked = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(asked) == 20 * 2 * 2
    assert min(asked) >= 20, "a replica that gets less of the processor takes fewer, but not a quarter"


def test_a_restarted_replica_serves_the_current_weights_and_stays_paused(pool: EnginePool, other_weights: Path) -> None:
    pool.update_weights(other_weights, 5)
    pool.pause("wait")
    first, second = pool.replicas.serving()
    kill(second.client.status().pid)
    with pytest.raises(EngineError, match="does not answer"):
        second.client.status()
    status = pool.status()  # one down is not all down
    assert status.policy_version == 5 and status.paused
    assert pool.base_url == first.client.base_url
    wait_until(lambda: not pool.replicas.down())
    statuses = [replica.client.status() for replica in pool.replicas.serving()]
    served = {(status.policy_version, status.weights_digest, status.paused) for status in statuses}
    assert served == {(5, digest_weights(other_weights), True)} and len(statuses) == 2
    one, other = pool.score_everywhere(PROMPTS[:4]).values()
    assert mean_difference(one, other) < 1e-5
    pool.resume()
    assert not pool.status().paused


class Misled(EngineClient):
    """A client whose engine is told of another folder than its caller says."""

    folder: Path

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Pass on the wrong folder, but for the first weights."""
        super().update_weights(self.folder if policy_version else folder, policy_version)


@pytest.fixture
def misled(pool: EnginePool, start: Start, cluster: Cluster) -> Callable[[Path], EnginePool]:
    """``misled(folder)``: a pool of the same processes, whose replica 1 loads ``folder`` in place of what is wanted."""

    def make(folder: Path) -> EnginePool:
        client = Misled(start(1).address, cluster)
        client.folder = folder
        return EnginePool({0: start(0), 1: client}, start)

    return make


def assert_first_weights(pool: EnginePool, tiny_model: Path) -> None:
    for replica in pool.replicas.serving():
        status = replica.client.status()
        assert (status.policy_version, status.weights_digest) == (0, digest_weights(tiny_model))
        assert not status.paused
    assert len(pool.replicas.serving()) == 2


def test_where_one_refuses_new_weights_none_keeps_them(
    misled: Callable[[Path], EnginePool], tiny_model: Path, other_weights: Path, tmp_path: Path
) -> None:
    pool = misled(tmp_path)
    with pytest.raises(WeightMismatchError, match=r"no \.safetensors"):
        pool.update_weights(other_weights, 8)
    assert_first_weights(pool, tiny_model)


def test_the_canary_checks_every_replica(
    misled: Callable[[Path], EnginePool], policy_engine: PolicyEngine, tiny_model: Path, other_weights: Path
) -> None:
    wrong = misled(other_weights)
    canary = Canary(PROMPTS[:4], policy_engine.score(PROMPTS[:4]))
    with pytest.raises(WeightMismatchError, match=wrong.replicas.serving()[1].url):
        update_checked(wrong, tiny_model, 9, canary)
    assert_first_weights(wrong, tiny_model)


def test_deploy_updates_a_replica_that_serves_other_weights(
    pool: EnginePool, policy_engine: PolicyEngine, tiny_model: Path, other_weights: Path
) -> None:
    pool.update_weights(other_weights, 3)
    canary = Canary(PROMPTS[:4], pool.score(PROMPTS[:4]))
    policy = Policy(str(other_weights), 3, digest_weights(other_weights), 1, canary)
    assert deploy(pool, policy) is None
    pool.replicas.serving()[1].client.update_weights(tiny_model, 0)  # as a process that was just started
    assert "differ" in pool.status().weights_digest
    difference = deploy(pool, policy)
    assert difference is not None and difference < 1e-5
    assert {replica.client.status().policy_version for replica in pool.replicas.serving()} == {3}
    pool.pause("wait")  # a deploy that was interrupted
    assert deploy(pool, policy) is not None and not pool.status().paused


def test_a_rolling_update_keeps_a_replica_in_service_and_fails_no_request(
    pool: EnginePool, tiny_model: Path, other_weights: Path
) -> None:
    versions: list[int] = []
    in_service: list[int] = []
    failures: list[Exception] = []
    stop = threading.Event()

    def ask() -> None:
        clients = RecordingClients(pool.base_url, 60.0, pool.replicas, pool.api_key)
        messages: list[Any] = [{"role": "user", "content": "1 + 1 ="}]
        while not stop.is_set():
            with clients.sync_client(RunHistory("tiny", SamplingParams(4), 0)) as client:
                try:
                    answer = client.chat.completions.with_raw_response.create(
                        model="tiny", messages=messages, max_tokens=4
                    )
                    versions.append(int(answer.headers["x-policy-version"]))
                except Exception as error:
                    failures.append(error)

    def watch() -> None:
        while not stop.is_set():
            in_service.append(len(pool.replicas.serving()))
            time.sleep(0.001)

    canary = Canary(PROMPTS[:4], score_of(pool, other_weights, tiny_model))
    policy = Policy(str(other_weights), 3, digest_weights(other_weights), 1, canary)
    threads = [threading.Thread(target=work) for work in (ask, ask, ask, watch)]
    for thread in threads:
        thread.start()
    wait_until(lambda: failures or len(versions) > 5)
    assert deploy(pool, policy, least_serving=1) is not None
    asked = len(versions)
    wait_until(lambda: failures or len(versions) > asked + 5)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(versions) == {0, 3}
    assert set(in_service) == {1, 2}
    assert {replica.client.status().policy_version for replica in pool.replicas.serving()} == {3}
    with pytest.raises(EngineError, match="no replica can be updated while 2 others must serve"):
        deploy(pool, Policy(str(tiny_model), 4, digest_weights(tiny_model), 2), least_serving=2)
    assert {replica.client.status().policy_version for replica in pool.replicas.serving()} == {3}


def score_of(pool: EnginePool, weights: Path, before: Path) -> list[list[float]]:
    """The log-probs of these weights; the pool has the weights ``before`` afterwards."""
    pool.update_weights(weights, 1)
    scores = pool.score(PROMPTS[:4])
    pool.update_weights(before, 0)
    return scores


def test_a_rolling_update_is_rolled_back_if_the_canary_of_a_replica_fails(
    misled: Callable[[Path], EnginePool], policy_engine: PolicyEngine, tiny_model: Path, other_weights: Path
) -> None:
    wrong = misled(other_weights)
    canary = Canary(PROMPTS[:4], policy_engine.score(PROMPTS[:4]))
    with pytest.raises(WeightMismatchError, match=wrong.replicas.serving()[1].url):
        deploy(wrong, Policy(str(tiny_model), 9, digest_weights(tiny_model), 1, canary), least_serving=1)
    assert_first_weights(wrong, tiny_model)


def test_a_replica_that_cannot_be_rolled_back_is_marked_down(
    misled: Callable[[Path], EnginePool],
    policy_engine: PolicyEngine,
    tiny_model: Path,
    other_weights: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise EngineError("the previous weights are gone")

    wrong, marked = misled(other_weights), list[int]()
    monkeypatch.setattr(wrong._weights, "restore", refuse)
    monkeypatch.setattr(wrong.replicas, "on_down", marked.append)  # instead of a restart
    canary = Canary(PROMPTS[:4], policy_engine.score(PROMPTS[:4]))
    with pytest.raises(WeightMismatchError):
        deploy(wrong, Policy(str(tiny_model), 9, digest_weights(tiny_model), 1, canary), least_serving=1)
    assert marked == [0] == list(wrong.replicas.down())
    assert [replica.number for replica in wrong.replicas.serving()] == [1]  # restored by its own check


def test_a_restarted_replica_that_fails_the_canary_does_not_serve(
    pool: EnginePool, start: Start, misled: Callable[[Path], EnginePool], other_weights: Path, tiny_model: Path
) -> None:
    client = misled(other_weights).replicas.serving()[1].client

    def start_misled(number: int) -> EngineClient:
        return client

    mine = EnginePool({0: start(0), 1: start(1)}, start_misled)
    mine.update_weights(tiny_model, 6)
    process = psutil.Process(client.status().pid)
    second = mine.replicas.serving()[1]
    second.client.update_weights(other_weights, 7)  # as one that was lost and is there again
    mine.replicas.mark_down(second, "lost")
    wait_until(lambda: "could not be restarted" in mine.replicas.down()[1])
    assert "digest" in mine.replicas.down()[1]
    process.wait(10)
    assert [replica.number for replica in mine.replicas.serving()] == [0]
    assert pool.status().policy_version == 6  # finds that the process is gone, and starts it again


def test_the_right_file_with_wrong_numbers_is_noticed(pool: EnginePool) -> None:
    first, second = (replica.client for replica in pool.replicas.serving())
    weights = PoolWeights()
    with pytest.raises(EngineError, match="no reference to compare"):
        weights.bring_up(second, [])
    weights.learn(first.status())
    weights.score(first)
    weights.bring_up(second, [])
    assert weights._scored is not None
    weights._scored[1][0][3] += 0.5
    with pytest.raises(WeightMismatchError, match="log-probs differ"):
        weights.bring_up(second, [])
    assert second.status().paused
    second.resume()


def test_a_batch_has_one_policy_version_during_weight_updates(pool: EnginePool, other_weights: Path) -> None:
    first, second = pool.replicas.serving()
    answered = first.client.metrics()["requests"]
    second.client.pause("wait")  # its share waits until the other one is sampled and the weights are new
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.generate, PROMPTS, SAMPLING)
        wait_until(lambda: first.client.metrics()["requests"] > answered)
        pool.update_weights(other_weights, 5)
        second.client.resume()
        generations = future.result(60)
    assert {generation.policy_version for generation in generations} == {5}
    assert tokens(generations) == tokens(pool.generate(PROMPTS, SAMPLING))


def test_an_interruption_ends_the_work_of_all(pool: EnginePool) -> None:
    serving = pool.replicas.serving()
    before = [replica.client.metrics()["generate_seconds"] for replica in serving]

    def interrupt() -> None:
        wait_until(
            lambda: all(
                replica.client.metrics()["generate_seconds"] > then
                for replica, then in zip(serving, before, strict=True)
            )
        )
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    sampled = pool.metrics()["completion_tokens"]
    with pytest.raises(KeyboardInterrupt):
        pool.generate(PROMPTS, SamplingParams(2000, n=16, seed=1))
    thread.join()
    pool.pause("wait")  # returns once nothing runs
    pool.resume()
    sampled = pool.metrics()["completion_tokens"] - sampled
    assert 0 < sampled < len(PROMPTS) * 16 * pool.status().max_model_len / 4
    assert len(pool.generate(PROMPTS[:4], SamplingParams(4))) == 4


def test_an_error_names_all_lost_replicas_and_all_restart(pool: EnginePool, start: Start, other_weights: Path) -> None:
    pool.update_weights(other_weights, 4)
    expected = tokens(pool.generate(PROMPTS, SAMPLING))

    def refuse(number: int) -> EngineClient:
        raise EngineError(f"no machine for replica {number}")

    mine = EnginePool({0: start(0), 1: start(1)}, refuse)
    for replica in mine.replicas.serving():
        kill(replica.client.status().pid)
    with pytest.raises(EngineError, match=r"replica 0: .*; replica 1: "):
        mine.generate(PROMPTS, SAMPLING)
    with pytest.raises(EngineError, match=r"replica 1: .*no machine for replica 1"):
        wait_until(lambda: "no machine" in mine.replicas.down()[1])
        mine.status()
    with pytest.raises(EngineError, match="no replica"):
        explore(mine)
    with pytest.raises(EngineError, match="does not answer"):
        pool.status()
    wait_until(lambda: not pool.replicas.down())  # this one knows what they served, and how that answers
    assert tokens(pool.generate(PROMPTS, SAMPLING)) == expected
