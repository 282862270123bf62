"""Attempts in workers on the nodes of a Ray cluster: the rows of the local run, whatever dies."""

import os
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rft_platform.cluster.child import MachineLostError
from rft_platform.cluster.interface import Bundle, Worker
from rft_platform.cluster.worker_pool import WorkerKind, WorkerPool
from rft_platform.common.errors import UserError
from rft_platform.rollout.workflow import WorkerWorkflow
from tests.cluster import child_functions
from tests.rollout.fake_engine import FakeEngine
from tests.rollout.test_workers import explore, facts, tasks
from tests.support.builders import alive, wait_until
from tests.support.raylets import Raylets

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

pytestmark = pytest.mark.slow

WHERE, WAITS, DIES = (f"tests.ray_cluster.agents:{name}" for name in ("where", "waits", "dies_once"))


def without_place(rows: Any) -> list[dict[str, Any]]:
    """The facts of rows, in the order of their ids, without the processes that made them."""
    return sorted(({**row, "run_output": None} for row in facts(rows)), key=lambda row: str(row["run_id"]))


def outputs(rows: Any, key: str) -> set[Any]:
    """The values of ``key`` in the responses; the last row of a run has its response."""
    return {row.run_output[key] for row in rows if row.run_output is not None}


def test_the_rows_are_those_of_one_machine(engine: FakeEngine, cluster: "RayCluster", tmp_path: Path) -> None:
    given, options = tasks([None] * 6), {"repeat_times": 2}
    here = explore(engine, WorkerWorkflow(WHERE, count=2, log_folder=tmp_path), given, **options)
    there = explore(engine, WorkerWorkflow(WHERE, count=4, log_folder=tmp_path, cluster=cluster), given, **options)
    assert without_place(there.rows) == without_place(here.rows) and len(here.rows) == 36
    assert there.report.failed == 0
    actors = outputs(there.rows, "actor")
    assert os.getpid() not in actors
    wait_until(lambda: not any(map(alive, actors)), "the actors ended", 30)


def test_more_runs_than_nodes_have_room_for_share_the_workers(engine: FakeEngine, cluster: "RayCluster") -> None:
    """Three nodes of 4 processors hold one worker of 3 each: the other slots take over workers that become idle."""
    workflow = WorkerWorkflow(WHERE, count=8, cluster=cluster, cpus=3)
    batch = explore(engine, workflow, tasks([None] * 12), concurrency=8)
    assert batch.report.failed == 0 and len(batch.rows) == 36
    assert len(outputs(batch.rows, "worker")) <= 3


@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_run_whose_worker_dies_is_repeated(
    engine: FakeEngine, cluster: "RayCluster", tmp_path: Path, victim: str
) -> None:
    given = tasks([None, victim, None, victim], folder=str(tmp_path))
    local = explore(engine, WorkerWorkflow(DIES, count=2), tasks([None] * 4, folder=str(tmp_path)))
    batch = explore(engine, WorkerWorkflow(DIES, count=2, cluster=cluster), given, max_retries=1)
    assert batch.report.failed == 0 and sum(batch.report.errors.values()) == 2
    (cause,) = dict(batch.report.errors)
    how = "was killed by SIGKILL" if victim == "worker" else "was lost with its actor or its node"
    assert cause.startswith(f"WorkerDied: the worker process {how}")
    assert len(batch.rows) == 4 and {row.run_id for row in batch.rows} == {row.run_id for row in local.rows}


def test_the_loss_of_a_node_loses_no_run(
    engine: FakeEngine, cluster: "RayCluster", nodes: Raylets, tmp_path: Path
) -> None:
    """Three nodes of 4 processors: while nine runs wait, each node has at least one of them."""
    undisturbed = explore(engine, WorkerWorkflow(WHERE, count=2), tasks([None] * 8), repeat_times=2)

    def kill_a_node() -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.waiting"))) == 9, "nine runs wait", 60)
        nodes.kill(1)
        (tmp_path / "continue").touch()

    killing = threading.Thread(target=kill_a_node)
    killing.start()
    workflow = WorkerWorkflow(WAITS, count=9, cluster=cluster)
    try:
        batch = explore(
            engine, workflow, tasks([None] * 8, folder=str(tmp_path)), concurrency=9, repeat_times=2, max_retries=3
        )
    finally:
        killing.join()
        nodes.add()
    assert batch.report.failed == 0 and batch.report.retried >= 1
    expected = without_place(undisturbed.rows)
    rows = without_place(batch.rows)
    assert {row["run_id"] for row in rows if row["attempt"] > 0}
    # an attempt that was lost with its node is repeated with its seed
    assert [{**row, "attempt": 0} for row in rows] == expected


async def test_a_lost_node_fails_one_call_of_its_idle_workers(
    cluster: "RayCluster", nodes: Raylets, tmp_path: Path
) -> None:
    index = nodes.add()
    bundles = [Bundle(1, resources={f"extra-{index}": 0.2})] * 3  # of the first workers; later ones start anywhere

    def start(module: str, **options: Any) -> Worker:
        return cluster.worker(module, bundle=bundles.pop() if bundles else Bundle(1), **options)

    kind = WorkerKind("pids", child_functions.__name__, b"null", start, "pids.log", log_folder=tmp_path)
    async with WorkerPool(kind, 3) as pool:
        async with AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(pool.lent()) for _ in range(3)]
            pids = [await lent.worker.ask_async("pid") for lent in idle]
            for lent in idle:
                lent.reusable = True
        nodes.kill(index)
        wait_until(lambda: not any(map(alive, pids)), "the workers have ended with their node", 60)
        with pytest.raises(MachineLostError):
            async with pool.lent() as lent:
                await lent.worker.ask_async("pid")
        async with pool.lent() as lent:
            assert await lent.worker.ask_async("pid") not in pids


def test_another_interpreter_needs_no_ray(engine: FakeEngine, cluster: "RayCluster") -> None:
    """The environment that Ray is installed beside, which has everything else."""
    base = next(Path(folder) for folder in sys.path if (Path(folder) / "openai").is_dir())
    python = base.parents[2] / "bin" / "python"
    found = subprocess.run([python, "-c", "import ray"], capture_output=True, text=True, env={})
    assert "No module named 'ray'" in found.stderr
    workflow = WorkerWorkflow(f"{__name__.rpartition('.')[0]}.agents:which_python", cluster=cluster, python=str(python))
    batch = explore(engine, workflow, tasks([None]))
    assert outputs(batch.rows, "python") == {str(python)}


def test_a_workflow_that_workers_cannot_load_is_the_users_error(engine: FakeEngine, cluster: "RayCluster") -> None:
    with pytest.raises(UserError, match="no-python: cannot be run"):
        explore(engine, WorkerWorkflow(WHERE, python="/nowhere/no-python", cluster=cluster), tasks([None]))
    with pytest.raises(UserError, match=r"cannot run 'no.such.agent:run': workflow .* cannot import no.such.agent"):
        explore(engine, WorkerWorkflow("no.such.agent:run", cluster=cluster), tasks([None]))


def test_nodes_list_their_resources(cluster: "RayCluster") -> None:
    nodes = cluster.nodes()
    assert len(nodes) >= 3 and str(nodes[0]).startswith("127.0.0.1: 4 CPUs, 0 GPUs")
    assert all(node.holds(Bundle(4)) and not node.holds(Bundle(5)) for node in nodes)
    assert not any(node.holds(Bundle(resources={"browser": 1})) for node in nodes)
