"""Services on a Ray cluster: what remains when an actor or a node is lost, groups over nodes, and what is refused."""

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from rft_platform.cluster.interface import Bundle, Group, StartError
from rft_platform.cluster.local.leases import naming_starter
from rft_platform.cluster.local.processes import wait_until_ended
from tests.cluster.test_cluster import ask, echo
from tests.support.builders import wait_until
from tests.support.raylets import Raylets

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

pytestmark = pytest.mark.slow


def test_a_service_ends_with_its_actor_and_restarts_as_the_next_generation(cluster: "RayCluster") -> None:
    first = cluster.ensure(echo())
    service = psutil.Process(first.details["pid"])
    psutil.Process(service.ppid()).kill()
    assert wait_until_ended([service], 10) == []
    assert cluster.find("echo") is None and not cluster.answers(first)
    second = cluster.ensure(echo())
    assert (second.generation, ask(second).text) == (2, "hello")


def test_a_service_of_a_lost_node_starts_on_another(cluster: "RayCluster", nodes: Raylets) -> None:
    index = nodes.add()
    where = Bundle(resources={f"extra-{index}": 1.0})
    with pytest.raises(StartError, match=r"no node has 1 CPU, 0 GPUs, 1 extra-99 \(there is 127.0.0.1: 4 CPUs"):
        cluster.ensure(echo(bundle=Bundle(resources={"extra-99": 1.0})))
    first = cluster.ensure(echo(bundle=where))
    process = psutil.Process(first.details["pid"])
    nodes.kill(index)
    began = time.monotonic()
    assert wait_until_ended([process], 60) == []
    second = cluster.ensure(echo())
    assert (second.generation, ask(second).text) == (first.generation + 1, "hello")
    assert time.monotonic() - began < 90


def test_a_command_ends_processes_that_it_started_and_no_other_uses(cluster: "RayCluster") -> None:
    with naming_starter() as starter:
        cluster.ensure(echo())
        assert cluster.used() == {"echo"}
        cluster.end_use("echo", None)
        assert cluster.find("echo") is not None, "the command leaves it running"
        cluster.ensure(echo())
        assert cluster.processor_seconds()["echo", 1] > 0
        cluster.end_use("echo", starter)
    assert cluster.find("echo") is None and cluster.services() == {}
    detached = cluster.ensure(echo())
    cluster.end_use("echo", "another")
    assert cluster.find("echo") == detached, "no command started it"


def test_a_group_needs_as_many_nodes(cluster: "RayCluster") -> None:
    group = Group(1, 9, "any:0")
    with pytest.raises(StartError, match=r"was not placed within 3 s: 9 nodes with room for 1 CPU, 0 GPUs each"):
        cluster.ensure(echo(group=group, bundle=Bundle(1), start_timeout_s=3.0))
    assert cluster.ray.util.placement_group_table() == {} or all(
        each["state"] == "REMOVED" for each in cluster.ray.util.placement_group_table().values()
    )


def test_a_group_that_loses_a_node_while_it_starts_does_not_wait_for_it(cluster: "RayCluster") -> None:
    from rft_platform.cluster.ray.connection import kill

    ray, name = cluster.ray, "echo#1.#1"  # the second node of the first generation

    def kill_the_second_node() -> None:
        def found() -> list[str]:
            return [actor for actor in ray.util.list_named_actors() if actor.endswith(name)]

        wait_until(found, "the second node has its actor", 60)
        kill(ray, ray.get_actor(found()[0]))

    killing = threading.Thread(target=kill_the_second_node)
    killing.start()
    began = time.monotonic()
    with pytest.raises(StartError, match="a node of its group was lost while it started"):
        cluster.ensure(echo(group=Group(1, 2, "any:0"), bundle=Bundle(1), start_timeout_s=150.0))
    killing.join()
    assert time.monotonic() - began < 100
    assert cluster.services() == {}


@pytest.mark.parametrize("victim", ["actor", "rank"])
def test_a_running_group_ends_with_a_further_node(cluster: "RayCluster", victim: str) -> None:
    """Its first rank would wait for the other until the time-out of a collective operation."""
    group = echo(group=Group(1, 2, "any:0"), bundle=Bundle(1), start_timeout_s=150.0)
    first = cluster.ensure(group)
    service = psutil.Process(first.details["pid"])
    assert ask(first).text == "hello"
    if victim == "actor":
        cluster.ray.kill(cluster.ray.get_actor(f"{cluster._prefix}echo#1.#1"))
    else:
        (rank,) = [each for each in psutil.process_iter() if is_rank(each, 1, service)]
        rank.kill()
    assert wait_until_ended([service], 30) == []
    wait_until(lambda: cluster.services() == {}, "the group has ended", 30)
    second = cluster.ensure(group)
    assert (second.generation, ask(second).text) == (2, "hello")


def test_a_group_that_ends_by_itself_gives_its_nodes_back(cluster: "RayCluster") -> None:
    """The ranks of its further node end before the first one, which may still save its state."""
    from rft_platform.cluster.ray.groups import living_groups

    env = {**echo().env, "ECHO_FOLLOWS_S": "1", "ECHO_WORK_S": "3"}
    group = Group(1, 2, "any:0")
    cluster.ensure(echo(group=group, bundle=Bundle(1), start_timeout_s=150.0, idle_timeout_s=1.0, env=env))
    wait_until(lambda: living_groups(cluster.ray, cluster._prefix) == [], "the group is removed", 60)
    assert "its work is done" in cluster.log_tail("echo") and cluster.services() == {}


def is_rank(process: psutil.Process, rank: int, first: psutil.Process) -> bool:
    """Whether ``process`` is a rank of the group whose first rank is ``first``."""
    with suppress(psutil.Error):
        own, others = process.environ(), first.environ()
        return own.get("RANK") == str(rank) and own.get("MASTER_PORT") == others["MASTER_PORT"]
    return False


def test_a_stop_of_a_generation_leaves_a_successor_that_starts_meanwhile(
    cluster: "RayCluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    first, call, started = cluster.ensure(echo()), cluster._call, []

    def call_while_another_starts(actor: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "stop":
            monkeypatch.undo()
            psutil.Process(first.details["pid"]).kill()
            wait_until(lambda: cluster.find("echo") is None, "the first generation is lost", 30)
            started.append(cluster.ensure(echo()))
        return call(actor, method, *arguments, **options)

    monkeypatch.setattr(cluster, "_call", call_while_another_starts)
    cluster.stop("echo", 5.0, generation=1)
    assert [address.generation for address in started] == [2]
    assert cluster.find("echo") == started[0] and ask(started[0]).text == "hello"


def test_an_actor_that_gets_no_service_ends(cluster: "RayCluster") -> None:
    """Its starter was killed before it could start or end the service."""
    from rft_platform.cluster.ray.actors import ServiceActor

    ray = cluster.ray
    actor = ray.remote(ServiceActor).options(name="nobody", lifetime="detached", num_cpus=0)
    actor.remote(str(cluster.logs), unused_s=2.0)
    assert "nobody" in ray.util.list_named_actors()
    wait_until(lambda: "nobody" not in ray.util.list_named_actors(), "the actor has ended", 30)


def test_a_placement_group_without_actors_is_removed(cluster: "RayCluster") -> None:
    from rft_platform.cluster.ray.groups import living_groups, place_group

    group = echo(group=Group(1, 2, "any:0"))
    place_group(cluster.ray, f"{cluster._prefix}echo#7", Bundle(1), group)
    assert cluster.services() == {} and living_groups(cluster.ray, cluster._prefix) != []
    cluster.stop_strays()
    assert living_groups(cluster.ray, cluster._prefix) == []


def test_a_process_that_ray_kills_for_its_memory_counts_as_lost(cluster: "RayCluster") -> None:
    from rft_platform.cluster.ray.connection import lost

    assert issubclass(cluster.ray.exceptions.OutOfMemoryError, lost(cluster.ray))


def test_the_cluster_is_small_enough_for_tests(nodes: Raylets, cluster: "RayCluster") -> None:
    """Less than 3 GB for the nodes and a service; memory that processes share counts once."""
    cluster.ensure(echo())
    folder, used = nodes.environment["RAY_TMPDIR"], 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == folder:
                used += process.memory_full_info().pss
    assert 0 < used < 3 << 30
