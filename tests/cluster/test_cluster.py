"""What every ``Cluster`` does, written against its interface; each implementation runs the same tests."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from rft_platform.cluster.interface import Address, Bundle, Cluster, Service, StartError
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.processes import wait_until_ended
from tests.support.builders import wait_until
from tests.support.raylets import raylets

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
#: How another process makes the cluster, by implementation; the same folder makes the same cluster.
MAKE = {
    "local": ("local.local_cluster", "LocalCluster(folder / 'leases', folder / 'logs')"),
    "ray": ("ray.ray_cluster", "RayCluster(folder / 'leases', folder / 'logs')"),
}
#: Another caller: finds or starts the service and prints its process id.
CALLER = """
import sys
from pathlib import Path
from rft_platform.cluster.{module} import *
from tests.cluster.test_cluster import echo
folder = Path(sys.argv[1])
print(({make}).ensure(echo()).details["pid"])
"""


def echo(text: str = "hello", **changes: object) -> Service:
    """The service of these tests."""
    service = Service(
        "echo", "tests.cluster.echo_service", (text,), digest=text, env={"PYTHONPATH": str(REPOSITORY)}, answer_s=3.0
    )
    return replace(service, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[kind for kind in MAKE if kind == "local" or find_spec("ray")])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with raylets(3) if request.param == "ray" else nullcontext():
        yield str(request.param)


@pytest.fixture
def cluster(kind: str, tmp_path: Path) -> Iterator[Cluster]:
    made = make(kind, tmp_path)
    yield made
    made.stop("echo", 5.0)


def make(kind: str, folder: Path) -> Cluster:
    if kind == "local":
        return LocalCluster(folder / "leases", folder / "logs")
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    return RayCluster(folder / "leases", folder / "logs")


def ask(address: Address, path: str = "/echo", token: str | None = None) -> httpx.Response:
    key = address.token if token is None else token
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{address.url}{path}", headers=headers, timeout=10, trust_env=False)


def process(address: Address) -> psutil.Process:
    return psutil.Process(address.details["pid"])


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_service_is_started_once_and_found_by_its_name_and_digest(cluster: Cluster) -> None:
    assert cluster.find("echo") is None and cluster.running() == []
    started = cluster.ensure(echo())
    assert ask(started).text == "hello"
    assert cluster.ensure(echo()) == started == cluster.find("echo")
    assert cluster.running("e*") == [started] and cluster.running("other*") == []
    assert cluster.answers(started)
    assert (started.generation, started.digest, started.details["text"]) == (1, "hello", "hello")


def test_a_start_and_its_stages_are_announced(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rft_platform.common.progress")
    stages = {"repeats hello": "repeating", "0 %": "loading", "no such line": "never"}
    cluster.stop("echo", 5.0)
    for _ in range(2):  # the second start ignores the lines of the first
        for _ in range(2):  # the second call finds the service
            cluster.ensure(echo(env={**echo().env, "ECHO_DELAY_S": "1"}, stages=stages))
        cluster.stop("echo", 5.0)
    announced = [record.announcement for record in caplog.records if hasattr(record, "announcement")]
    assert announced == ["echo: starting", "echo: loading", "echo: repeating"] * 2


def test_of_two_callers_at_once_one_starts_it(cluster: Cluster, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CALLER.format(module=MAKE[kind][0], make=MAKE[kind][1]), str(tmp_path)]
    others = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        own = list(threads.map(cluster.ensure, [echo(), echo()]))
    found = [int(other.communicate(timeout=120)[0]) for other in others]
    assert {address.details["pid"] for address in own} == set(found) and len(set(found)) == 1
    assert own[0].generation == 1


def test_another_digest_replaces_it(cluster: Cluster) -> None:
    first = cluster.ensure(echo())
    before = process(first)
    second = cluster.ensure(echo("other"))
    assert ask(second).text == "other" and second.generation == 2
    assert wait_until_ended([before], 0) == []
    assert not cluster.answers(first)


def test_a_killed_service_is_replaced_and_its_generation_rises(cluster: Cluster) -> None:
    first = cluster.ensure(echo())
    killed = process(first)
    killed.kill()
    assert wait_until_ended([killed], 10) == []
    assert cluster.find("echo") is None
    second = cluster.ensure(echo())
    assert second.generation == 2 and ask(second).text == "hello"
    assert not cluster.stop("echo", 5.0, generation=1), "the caller talked to another generation"
    assert ask(second).text == "hello"
    cluster.stop("echo", 5.0)
    assert cluster.ensure(echo()).generation == 3


def test_a_service_that_does_not_answer_is_replaced(cluster: Cluster) -> None:
    first = cluster.ensure(echo())
    stopped = process(first)
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for(lambda: not cluster.answers(first))
    second = cluster.ensure(echo())
    assert second.generation == 2 and ask(second).text == "hello"
    assert wait_until_ended([stopped], 0) == []


def test_an_idle_service_ends_and_one_that_is_used_does_not(cluster: Cluster) -> None:
    address = cluster.ensure(echo(idle_timeout_s=3.0))
    ended, began = process(address), time.monotonic()
    while time.monotonic() < began + 4.0:
        assert ask(address).text == "hello"
        time.sleep(0.2)
    assert wait_until_ended([ended], 30) == []
    assert cluster.find("echo") is None


def test_it_requires_the_token_that_its_address_names(cluster: Cluster) -> None:
    address = cluster.ensure(echo())
    assert len(address.token) > 20 and address.token not in repr(address)
    assert ask(address, token="").status_code == ask(address, token="wrong").status_code == 401
    assert ask(address, "/health", token="").status_code == 200
    assert address.token not in cluster.log_tail("echo")


def test_each_service_gets_a_port_and_reports_it(cluster: Cluster) -> None:
    one, two = cluster.ensure(echo()), cluster.ensure(echo("two", name="second"))
    try:
        assert one.url != two.url
        assert (ask(one).text, ask(two).text) == ("hello", "two")
    finally:
        cluster.stop("second", 5.0)


def test_its_log_can_be_read_also_if_it_does_not_start(cluster: Cluster) -> None:
    cluster.ensure(echo())
    assert "repeats hello" in cluster.log_tail("echo")
    with pytest.raises(StartError, match="the text is wrong") as refused:
        cluster.ensure(echo("wrong", name="second"))
    assert (refused.value.exit_code, refused.value.last_line) == (2, "error: the text is wrong")
    assert cluster.find("second") is None


def test_it_sees_its_devices_and_threads_only(cluster: Cluster) -> None:
    environment = process(cluster.ensure(echo(bundle=Bundle(2, "1,3")))).environ()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("1,3", "2")


def test_stop_ends_a_service_immediately_or_after_its_work(cluster: Cluster) -> None:
    assert not cluster.stop("echo", 5.0)
    first = process(cluster.ensure(echo()))
    assert cluster.stop("echo", 5.0)
    assert wait_until_ended([first], 0) == [] and cluster.find("echo") is None
    assert "ends after its work" not in cluster.log_tail("echo")
    second = process(cluster.ensure(echo()))
    assert cluster.stop("echo", 5.0, shutdown_path="/shutdown")
    assert wait_until_ended([second], 0) == [] and cluster.find("echo") is None
    assert "ends after its work" in cluster.log_tail("echo")


def test_an_idle_service_may_work_after_its_address_is_gone(cluster: Cluster) -> None:
    """As a trainer does that saves its state."""
    env = {**echo().env, "ECHO_WORK_S": "3"}
    cluster.ensure(echo(idle_timeout_s=1.0, env=env))
    wait_until(lambda: cluster.find("echo") is None, "the service is idle", 30)
    wait_until(lambda: "its work is done" in cluster.log_tail("echo"), "the service has ended its work", 15)
