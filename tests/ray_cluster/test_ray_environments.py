"""Runtime environments of workers: variables, code and packages that reach workflows, and environments that fail."""

import logging
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.schema.explorer import RuntimeEnv
from rft_platform.rollout.workers.import_check import check_importable
from rft_platform.rollout.workflow import WorkerWorkflow
from tests.ray_cluster.test_ray_workers import WHERE, outputs
from tests.rollout.fake_engine import FakeEngine
from tests.rollout.test_workers import explore, tasks

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

pytestmark = pytest.mark.slow

AGENT = """
import os
from pathlib import Path

from rft_platform.rollout.workflow import WorkflowOutput

from {module} import NAME


async def run(task, model):
    await model.chat([{{"role": "user", "content": task["question"]}}])
    variables = {{"town": os.environ.get("TOWN"), "key": os.environ.get("KEY_X")}}
    return WorkflowOutput(reward=1.0, response={{"name": NAME, "folder": str(Path.cwd()), **variables}})
"""


def code_in(folder: Path, agent: str = "town_agent", module: str = "town_names", name: str = "Ulm") -> Path:
    """A folder with an agent and the module that it imports; neither is on the path of this process."""
    folder.mkdir()
    (folder / f"{agent}.py").write_text(AGENT.format(module=module))
    (folder / f"{module}.py").write_text(f"NAME = {name!r}\n")
    return folder


def wheel(folder: Path, module: str, name: str) -> Path:
    file = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{module}.py", f"NAME = {name!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def in_environment(name: str, cluster: "RayCluster", **keys: Any) -> WorkerWorkflow:
    return WorkerWorkflow(name, count=1, cluster=cluster, runtime_env=RuntimeEnv.model_validate(keys).fields)


def test_variables_and_a_working_dir_reach_the_workflow(
    engine: FakeEngine, cluster: "RayCluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOWN", "of the command")
    monkeypatch.setenv("KEY_X", "a-secret-of-the-command")
    folder = code_in(tmp_path / "code")
    workflow = in_environment("town_agent:run", cluster, working_dir=str(folder), env_vars={"TOWN": "of the file"})
    check_importable(workflow)
    (row,) = explore(engine, workflow, tasks([None])).rows
    assert row.run_output == {
        "name": "Ulm", "folder": str(folder), "town": "of the file", "key": "a-secret-of-the-command",
    }  # fmt: skip


def test_modules_come_before_those_of_the_command(
    engine: FakeEngine, cluster: "RayCluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(code_in(tmp_path / "here", "own_agent", "own_names", "of the command")))
    folder = code_in(tmp_path / "there", "own_agent", "own_names", "of the file")
    workflow = in_environment("own_agent:run", cluster, py_modules=[str(folder / "own_agent.py")])
    assert outputs(explore(engine, workflow, tasks([None])).rows, "name") == {"of the file"}


@pytest.mark.parametrize("installer", ["py_modules", "pip", "uv"])
def test_a_wheel_is_installed_for_the_workers(
    engine: FakeEngine, cluster: "RayCluster", tmp_path: Path, installer: str
) -> None:
    module = f"wheel_for_{installer}"
    file = wheel(tmp_path, module, "of the wheel")
    folder = code_in(tmp_path / "code", module=module)
    (folder / f"{module}.py").unlink()
    option = f"{'uv_' if installer == 'uv' else ''}pip_install_options"
    options: Any = {"packages": [str(file)], option: ["--no-index"]}
    options = [str(file)] if installer == "py_modules" else options
    workflow = in_environment("town_agent:run", cluster, working_dir=str(folder), **{installer: options})
    check_importable(workflow)
    assert outputs(explore(engine, workflow, tasks([None])).rows, "name") == {"of the wheel"}


def test_an_environment_that_no_node_can_build_is_the_users_error(
    engine: FakeEngine, cluster: "RayCluster", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    began, missing = time.monotonic(), f"file://{tmp_path}/missing-1.0-py3-none-any.whl"
    workflow = in_environment(WHERE, cluster, py_modules=[missing], env_vars={"TOWN": "not for the log"})
    with pytest.raises(UserError, match=r"explorer.workers.runtime_env: a node cannot build it:\n(.*\n)*.*missing-1.0"):
        explore(engine, workflow, tasks([None] * 4), concurrency=4)
    with pytest.raises(UserError, match=r"explorer.workers.runtime_env: a node cannot build it:\n(.*\n)*.*missing-1.0"):
        check_importable(workflow)
    assert time.monotonic() - began < 60
    assert "not for the log" not in caplog.text


def test_what_ray_refuses_is_refused_before_anything_starts(cluster: "RayCluster", tmp_path: Path) -> None:
    refused = {
        r"runtime_env: Ray refuses it: .*cannot be specified at the same time": {"pip": ["one"], "uv": ["two"]},
        r"runtime_env: Ray refuses it: .*can only have these fields: packages, pip_check": {"pip": {"package": "one"}},
        r"runtime_env.working_dir .*nowhere: there is no such folder": {"working_dir": str(tmp_path / "nowhere")},
        r"runtime_env: Ray refuses it: .*not a valid file": {"pip": str(tmp_path / "requirements.txt")},
    }
    for message, keys in refused.items():
        with pytest.raises(UserError, match=f"(?s)explorer.workers.{message}"):
            check_importable(in_environment(WHERE, cluster, **keys))


def test_a_workflow_that_the_environment_lacks_is_the_users_error(cluster: "RayCluster", tmp_path: Path) -> None:
    workflow = in_environment("no_such_agent:run", cluster, working_dir=str(code_in(tmp_path / "code")))
    with pytest.raises(UserError, match=r"cannot import no_such_agent .*in a worker with explorer.workers.runtime_env"):
        check_importable(workflow)
