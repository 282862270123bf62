"""Which cluster a project runs on: its configuration says it, and a project of one machine imports no Ray."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft_platform.cluster.interface import Bundle, Node
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.ray.connection import AUTH_VARIABLE, check_installed
from rft_platform.cluster.ray.ray_cluster import RayCluster
from rft_platform.common.errors import UserError
from rft_platform.config.gpu_placement import engine_share
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.config.node_placement import Demand, placed
from rft_platform.run.start import on_cluster, write_config
from tests.cluster.test_cluster import ask, echo


def config_with(folder: Path, text: str) -> Any:
    file = folder / "project.yaml"
    file.write_text(f"model: {{model_path: /models/m}}\n{text}")
    return load_config(file)


def test_the_last_start_decides_where_commands_look(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.leases.mkdir(parents=True)
    assert isinstance(home.cluster, LocalCluster)
    local = config_with(tmp_path, "cluster: {address: 10.0.0.1:6379, namespace: own}")
    write_config(home, on_cluster(local, "ray"))
    assert json.loads(home.ray_cluster.read_text()) == {"address": "10.0.0.1:6379", "namespace": "own"}
    assert isinstance(home.cluster, RayCluster)
    write_config(home, local)
    assert isinstance(home.cluster, LocalCluster) and on_cluster(local, None) is local


def test_an_auxiliary_engine_reserves_its_own_gpus(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        "explorer: {engines_per_gpu: 2, rollout_model: {engine_num: 2},"
        " auxiliary_models: [{name: large, model_path: /models/l, tensor_parallel_size: 4}]}",
    )
    (large,) = config.explorer.auxiliary_models
    assert (engine_share(config, 8), engine_share(config, 8, large.lease), engine_share(config, 0)) == (0.5, 4.0, 0.0)


@pytest.mark.slow
def test_a_project_of_one_machine_imports_no_ray(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rft_platform.config.gpu_placement import engine_share
from rft_platform.config.home import Home
from rft_platform.run.checks import check_run
import rft_platform.rounds.setup.connections, rft_platform.rollout.workers.worker_executor
cluster = Home(Path(sys.argv[1])).cluster
assert cluster.find("engine") is None and cluster.nodes() == []
print([name for name in sys.modules if name.split(".")[0] == "ray" or name.startswith("rft_platform.cluster.ray")])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_cluster_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rft_platform.cluster.ray.connection.find_spec", lambda name: object())
    for mode in ("disabled", None):
        monkeypatch.delenv(AUTH_VARIABLE, raising=False)
        if mode is not None:
            monkeypatch.setenv(AUTH_VARIABLE, mode)
        with pytest.raises(UserError, match=r"RAY_AUTH_MODE is not 'token', so everybody"):
            check_installed()
    monkeypatch.setenv(AUTH_VARIABLE, "token")
    check_installed()
    monkeypatch.setattr("rft_platform.cluster.ray.connection.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Ray is not installed; install it: pip install 'rft-platform\[ray\]'"):
        check_installed()


@pytest.mark.slow
def test_a_service_on_another_address_is_reached_by_it_alone(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "leases", tmp_path / "logs")
    address = cluster.ensure(echo(host="127.0.0.2"))
    try:
        assert address.url.startswith("http://127.0.0.2:") and ask(address).text == "hello"
        with pytest.raises(httpx.ConnectError):
            ask(replace(address, url=address.url.replace("127.0.0.2", "127.0.0.1")))
    finally:
        cluster.stop("echo", 5.0)


def test_demands_are_placed_largest_first_and_what_has_no_room_is_named() -> None:
    nodes = [Node("a", 4, 2), Node("b", 4, 1, {"browser": 1})]
    engine, trainer = Demand("engine", "e", Bundle(1, gpus=1), 2), Demand("trainer", "t", Bundle(2), 2, apart=True)
    browser = Demand("worker", "w", Bundle(1, resources={"browser": 1.0}))
    where, homeless = placed(nodes, [engine, trainer, browser])
    assert where == {"engine": ["a", "a"], "trainer": ["a", "b"], "worker": ["b"]} and homeless == []
    third = Demand("trainer", "t", Bundle(2), 3, apart=True)
    assert placed(nodes, [engine, third])[1] == [third]
    assert placed(nodes, [Demand("engine", "e", Bundle(1, gpus=1), 4)])[1] != []
    assert str(Bundle(1, gpus=2, resources={"browser": 1.0})) == "1 CPU, 2 GPUs, 1 browser"
    assert Bundle(1, gpus=1).times(3) == Bundle(3, gpus=3) and nodes[0].without(Bundle(3, gpus=1)) == Node("a", 1, 1)


def test_the_cluster_of_a_trinity_file(tmp_path: Path) -> None:
    text = "ray_namespace: team\ncluster: {{ray_address: {address}, node_num: 2, gpu_per_node: 8}}"
    there = config_with(tmp_path, text.format(address='"10.0.0.1:6379"')).cluster
    assert (there.kind, there.address, there.namespace) == ("ray", "10.0.0.1:6379", "team")
    assert (there.node_num, there.gpu_per_node) == (2, 8)
    assert config_with(tmp_path, text.format(address="auto")).cluster.kind == "local"
