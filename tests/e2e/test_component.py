"""Training projects as components of a Dagster deployment: scaffolded by `dg`, launched by Dagster's own processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
import yaml
from interface import wait_for

from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BIN, HERE = Path(sys.executable).parent, Path(__file__).resolve().parent

#: What `create-dagster project NAME` writes.
_DEFINITIONS = """\
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
_PYPROJECT = """\
[project]
name = "{name}"
requires-python = ">=3.10,<3.15"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "{name}"
registry_modules = ["rft_platform"]
"""
_INSTANCE = """\
telemetry: {enabled: false}
concurrency: {pools: {default_limit: 1, granularity: op}}
run_queue: {dequeue_interval_seconds: 1}
"""
_SENSORS = """
query { workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError {
  __typename ... on PythonError { message }
  ... on RepositoryLocation { name repositories { sensors { name } assetNodes { assetKey { path } } } } } } } } }
"""


class Deployment:
    """A Dagster deployment with several code locations, and the environment of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.locations, self.homes = folder, list[str](), dict[str, Path]()
        (folder / "dagster").mkdir()
        (folder / "dagster" / "dagster.yaml").write_text(_INSTANCE)

    def add_location(self, name: str) -> Path:
        """A fresh Dagster project; returns its folder."""
        project = self.folder / name
        for module, text in {"__init__": "", "definitions": _DEFINITIONS, "defs/__init__": ""}.items():
            file = project / "src" / name / f"{module}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (project / "pyproject.toml").write_text(_PYPROJECT.format(name=name))
        self.locations.append(name)
        return project

    @property
    def workspace(self) -> str:
        """The workspace file with all locations."""
        modules = [{"module_name": f"{name}.definitions", "location_name": name} for name in self.locations]
        file = self.folder / "workspace.yaml"
        file.write_text(yaml.safe_dump({"load_from": [{"python_module": module} for module in modules]}))
        return str(file)

    @property
    def environment(self) -> dict[str, str]:
        sources = [str(self.folder / name / "src") for name in self.locations]
        path = os.pathsep.join(filter(None, [*sources, str(HERE), os.environ.get("PYTHONPATH")]))
        unset = {name: value for name, value in os.environ.items() if name != "RFT_HOME"}
        own = {"DAGSTER_HOME": str(self.folder / "dagster"), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return {**unset, **own, "RFT_SENSOR_INTERVAL_S": "1", "RFT_RETRY_DELAY_S": "1"}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command of Dagster to its end; returns its output."""
        program, *arguments = command
        done = subprocess.run(
            [str(BIN / program), *arguments],
            env=self.environment, cwd=cwd or self.folder, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert not done.returncode, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def scaffold(self, project: Path, name: str, config: dict[str, Any], key_prefix: str) -> None:
        """Add a component to a Dagster project as a person does, and give it the project's configuration."""
        self.run("dg", "scaffold", "defs", "rft_platform.RftProjectComponent", name, cwd=project)
        folder = project / "src" / project.name / "defs" / name
        written = yaml.safe_load((folder / "defs.yaml").read_text())
        assert written["attributes"] == {"config": "rft.yaml", "rft_home": f".rft/{name}", "key_prefix": name}
        written["attributes"]["key_prefix"] = key_prefix
        (folder / "defs.yaml").write_text(yaml.safe_dump(written))
        (folder / "rft.yaml").write_text(yaml.safe_dump(config))
        self.homes[key_prefix] = project / ".rft" / name

    @contextmanager
    def process(self, name: str, *arguments: str) -> Iterator[None]:
        """One of Dagster's own servers, until the end of the block."""
        with (
            (self.folder / f"{name}.log").open("w") as log,
            subprocess.Popen(
                [str(BIN / name), *arguments], env=self.environment, cwd=self.folder,
                stdout=log, stderr=log, start_new_session=True,
            ) as server,
        ):  # fmt: skip
            try:
                yield
            finally:
                server.terminate()
                server.wait(60)


@pytest.fixture
def deployment(tmp_path: Path, tiny_model: Path, make_config, with_mlflow) -> Iterator[Deployment]:
    """Two code locations: one with two projects, and another one with a project of the same name."""
    made = Deployment(tmp_path)
    first, second = made.add_location("first"), made.add_location("second")
    for number, (project, name, prefix) in enumerate(
        [(first, "red", "red"), (first, "green", "team/green"), (second, "red", "blue")]
    ):
        data = tmp_path / f"data-{number}"
        data.mkdir()
        config = make_config(data, tiny_model)
        config["buffer"]["total_steps"] = 1
        made.scaffold(project, name, config, prefix)
    for home in made.homes.values():
        with_mlflow(home)
    yield made
    for home in made.homes.values():
        subprocess.run(
            [sys.executable, "-P", "-m", "rft_platform", "stop"], env={**made.environment, "RFT_HOME": str(home)},
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def rounds_of(instance: dg.DagsterInstance, prefix: str, asset: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey([*prefix.split("/"), asset])))


def test_projects_side_by_side_each_run_their_round(deployment: Deployment) -> None:
    assert "rft_platform.RftProjectComponent" in deployment.run(
        "dg", "list", "components", "--json", cwd=deployment.folder / "first"
    )
    for name in deployment.locations:
        assert "loaded successfully" in deployment.run("dg", "check", "defs", cwd=deployment.folder / name)
    listed = deployment.run("dg", "list", "defs", "--json", cwd=deployment.folder / "first")
    assert '"red/policy_checkpoint"' in listed and '"team/green/policy_checkpoint"' in listed
    workspace, port = ["-w", deployment.workspace], free_port()
    deployment.run("dagster", "definitions", "validate", *workspace)
    for name in deployment.locations:
        deployment.run("dagster", "sensor", "start", "--start-all", "-l", name, *workspace)
    with (
        deployment.process("dagster-webserver", *workspace, "-h", "127.0.0.1", "-p", str(port)),
        deployment.process("dagster-daemon", "run", *workspace),
    ):
        for home in deployment.homes.values():
            wait_for((home / "rounds" / "r0001" / "evaluation.json").exists, f"round 1 of {home}", 600)
        shown = httpx.post(f"http://127.0.0.1:{port}/graphql", json={"query": _SENSORS}, timeout=60).json()["data"]
        with dg.DagsterInstance.from_config(str(deployment.folder / "dagster")) as instance:
            for prefix in deployment.homes:
                wait_for(lambda p=prefix: rounds_of(instance, p, "evaluation_report"), f"the report of {prefix}", 60)
            runs = instance.get_runs()
            partitions = {
                prefix: set(instance.get_dynamic_partitions("__".join([*prefix.split("/"), "rft_round"])))
                for prefix in deployment.homes
            }
            assert instance.get_dynamic_partitions("rft_round") == []
    locations = [each["locationOrLoadError"] for each in shown["workspaceOrError"]["locationEntries"]]
    assert {location["name"] for location in locations} == {"first", "second"}
    assert all({"r0001"} <= found <= {"r0001", "r0002"} for found in partitions.values()), partitions
    assert not [(run.job_name, run.tags) for run in runs if run.is_failure]
    launched = sorted(run.job_name for run in runs)
    jobs = ["explore_job", "sync_round_job", "warm_start_job"]
    assert launched == sorted(f"{prefix}__{job}" for prefix in ("red", "team__green", "blue") for job in jobs)
    tags = {(run.job_name, run.tags.get("dagster/partition")) for run in runs}
    assert ("team__green__sync_round_job", "r0001") in tags
    assert not list(deployment.folder.rglob("mlruns")) and not (deployment.folder / ".rft").exists()
