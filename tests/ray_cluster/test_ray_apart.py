"""Nodes that do not see the home: what runs there, and how engines there get weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from rft_platform.cluster.interface import Bundle, Group, StartError
from rft_platform.common.files import read_json
from tests.cluster.test_cluster import ask, echo
from tests.e2e.conftest import ProjectFolder, small_config
from tests.support.raylets import Raylets

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def apart(nodes: Raylets, home: Path) -> Iterator[int]:
    """A node that does not see ``home``."""
    index = nodes.add(hidden=home)
    yield index
    nodes.kill(index)


@pytest.fixture
def cluster(home: Path, apart: int) -> Iterator["RayCluster"]:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    made = RayCluster(home / "leases", home / "logs", has_copy=True)
    yield made
    made.stop_all()


def test_services_that_read_the_home_run_where_it_is(cluster: "RayCluster", apart: int, home: Path) -> None:
    seen = [facts.has_home for facts in cluster.facts().values()]
    assert sorted(seen) == [False, *[True] * (len(seen) - 1)]
    where = Bundle(1, resources={f"extra-{apart}": 1.0})
    assert [node.has_home for node in cluster.nodes()].count(False) == 1
    with pytest.raises(StartError, match=rf"needs 1 x 1 CPU, 0 GPUs, 1 extra-{apart} on nodes that see {home}"):
        cluster.ensure(echo(bundle=where, reads_home=True))
    with pytest.raises(StartError, match="needs 9 x 1 CPU"):
        cluster.ensure(echo(bundle=Bundle(1), group=Group(1, 9, "any:0"), reads_home=True))
    assert ask(cluster.ensure(echo(bundle=Bundle(1), reads_home=True))).text == "hello"
    assert (home / "logs" / "echo.log").exists()


def test_other_services_leave_the_nodes_of_the_home_free(cluster: "RayCluster", home: Path) -> None:
    assert ask(cluster.ensure(echo(bundle=Bundle(1)))).text == "hello"
    assert not (home / "logs" / "echo.log").exists(), "it runs on the node that does not see this folder"
    assert "Last lines of" in cluster.log_tail("echo")
    cluster.stop("echo", 5.0)
    assert ask(cluster.ensure(echo(bundle=Bundle(1), group=Group(1, 2, "any:0"), reads_home=True))).text == "hello"


def test_without_a_copy_of_the_home_all_services_run_where_it_is(cluster: "RayCluster", home: Path) -> None:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    for name in ("one", "two"):
        RayCluster(home / "leases", home / "logs").ensure(echo(name=name, bundle=Bundle(1)))
        assert (home / "logs" / f"{name}.log").exists()
    assert not list((home / "leases").glob(".mark*"))


def test_an_engine_on_a_node_without_the_home_fetches_weights(
    nodes: Raylets, apart: int, home: Path, tmp_path: Path, tiny_model: Path
) -> None:
    document = small_config(tmp_path, tiny_model)
    document["store_url"] = f"file://{tmp_path}/store"
    file = tmp_path / "rft.yaml"
    file.write_text(yaml.safe_dump({**document, "store_url": None}))
    project = ProjectFolder(home, file)
    refused = project.rft("run", "--config", str(file), "--cluster", "ray", check=False)
    assert not (home / "leases").exists(), "a refused start writes nothing"
    assert f"does not see {home}: mount it there under this path, or set store_url" in refused.stderr
    file.write_text(yaml.safe_dump(document))
    project.rft("run", "--config", str(file), "--cluster", "ray", "--detach-engines")
    assert "it runs workers, and engines that fetch weights" in project.rft("doctor", check=False).stdout
    assert not (home / "logs" / "engine.log").exists() and (home / "logs" / "trainer.log").exists()
    served = [read_json(home / "rounds" / f"r000{number}" / "evaluation.json")["metrics"] for number in (1, 2)]
    assert all(metrics["canary_delta"] < 1e-4 for metrics in served)
    project.rft("stop")
