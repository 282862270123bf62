"""A whole project on Ray: engine, two trainer ranks on two nodes, agents in workers; the results of the local run."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

from tests.e2e.conftest import ProjectFolder, small_config
from tests.support.raylets import Raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# One worker, because the log-probs of float32 depend on which requests the engine batches together.
CONFIG: dict[str, Any] = {"explorer": {"workers": {"kind": "process", "count": 1}, "max_retry_times": 3}}


@pytest.fixture
def two_homes(tmp_path: Path, tiny_model: Path) -> tuple[ProjectFolder, ProjectFolder]:
    """The same project twice: for this machine, and for the cluster."""
    found = []
    for name in ("local", "ray"):
        folder = tmp_path / name
        folder.mkdir()
        document = small_config(folder, tiny_model, **CONFIG)
        document["buffer"]["total_steps"] = 1
        document["buffer"]["explorer_input"]["taskset"]["workflow"] = "tests.ray_cluster.agents:adds"
        if name == "ray":
            (folder / "code").mkdir()
            environment = {"working_dir": "./code", "env_vars": {"TOWN": "Ulm"}}
            document["cluster"] = {"node_num": 2}
            workers = {**CONFIG["explorer"]["workers"], "runtime_env": environment}
            document["explorer"] = {**document["explorer"], "workers": workers}
        else:
            document["trainer"] = {"nproc": 2}
        file = folder / "rft.yaml"
        file.write_text(yaml.safe_dump(document))
        found.append(ProjectFolder(folder / "home", file))
    return found[0], found[1]


def rows_of(project: ProjectFolder) -> list[dict[str, Any]]:
    return read(project, "rollouts", ["run_id", "prompt_ids", "response_ids", "rollout_logprobs"])


def read(project: ProjectFolder, kind: str, columns: list[str]) -> list[dict[str, Any]]:
    files = sorted((project.home / "rounds" / "r0001" / kind).glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    return sorted(rows, key=lambda row: str(row["run_id"]))


def test_rows_and_weights_are_those_of_the_local_run(
    nodes: Raylets, two_homes: tuple[ProjectFolder, ProjectFolder]
) -> None:
    local, on_ray = two_homes
    local.rft("run", "--config", str(local.config))
    plan = on_ray.rft("run", "--config", str(on_ray.config), "--cluster", "ray", "--dry-run").stdout
    assert "127.0.0.1: 4 CPUs, 0 GPUs" in plan and "trainer    2 x 1 CPU, 0 GPUs: on 127.0.0.1, 127.0.0.1" in plan
    assert f"in a runtime environment: env_vars TOWN; working_dir {on_ray.config.parent / 'code'}; config" in plan
    on_ray.rft("run", "--config", str(on_ray.config), "--cluster", "ray", "--detach-engines")
    doctor = on_ray.rft("doctor", check=False).stdout
    assert "Ray node 127.0.0.1: 4 CPUs" in doctor and "require a token" in doctor
    ours, theirs = rows_of(on_ray), rows_of(local)
    assert [{**row, "rollout_logprobs": 0} for row in ours] == [{**row, "rollout_logprobs": 0} for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row["rollout_logprobs"] == pytest.approx(other["rollout_logprobs"], abs=1e-6)
    judged = [read(project, "judged", ["run_id", "reward", "judge_version"]) for project in two_homes]
    assert judged[0] == judged[1]
    logs = [project.home / "logs" / "judge-workers.log" for project in two_homes]
    assert [log.exists() for log in logs] == [False, True]
    files = [Path(project.note(1, "policy")["folder"]) / "model.safetensors" for project in two_homes]
    one, other = map(load_file, files)
    assert all(abs(tensor - other[name]).max() <= 1e-6 for name, tensor in one.items())
    assert "engine" in on_ray.rft("stop").stdout and "nothing is running" in on_ray.rft("stop").stdout
    assert json.loads((on_ray.home / "ray.json").read_text()) == {"address": "auto", "namespace": "rft"}
