"""Three raylets on this host, for all tests of the folder. Without Ray they are skipped: ``make test-ray`` has it."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rollout.fake_engine import FakeEngine
from tests.support.raylets import Raylets, raylets

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[Raylets]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with raylets(3) as running:
        yield running


@pytest.fixture
def cluster(nodes: Raylets, tmp_path: Path) -> Iterator["RayCluster"]:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

    made = RayCluster(tmp_path / "leases", tmp_path / "logs")
    yield made
    made.stop_all()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    fake.serve()
    yield fake
    fake.shutdown()
