"""A project on S3 whose runs, engine and two trainer ranks are on a Ray cluster: the results of the local run."""

from pathlib import Path

import pytest

from tests.e2e.conftest import ProjectFolder
from tests.ray_cluster.conftest import nodes  # noqa: F401
from tests.s3.test_s3_project import assert_same_rows, assert_same_weights, make_project, rows_of
from tests.support.raylets import Raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AGENT = {"workflow": "tests.ray_cluster.agents:adds"}


def test_rows_and_weights_are_those_of_the_local_run(
    nodes: Raylets,  # noqa: F811
    tmp_path: Path,
    tiny_model: Path,
    bucket: str,
) -> None:
    local = make_project(tmp_path / "local", tiny_model, 1, AGENT, trainer={"nproc": 2})
    local.rft("run", "--config", str(local.config))
    on_ray = make_project(tmp_path / "ray", tiny_model, 1, AGENT, cluster={"node_num": 2}, store_url=bucket)
    on_ray.rft("run", "--config", str(on_ray.config), "--cluster", "ray")
    assert_same_rows(rows_of(on_ray), rows_of(local))
    assert_same_weights(on_ray, local, 1)

    second = ProjectFolder(tmp_path / "another" / "home", on_ray.config)
    second.rft("run", "--config", str(on_ray.config), "--cluster", "ray")  # nothing is left to do
    second.rft("store", "check")
    assert_same_rows(rows_of(second), rows_of(local))
    assert_same_weights(second, local, 1)
