"""A dry run refuses what cannot run: missing tasks, functions and services."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rollout.workers.import_check import check_importable
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.run.project_checks import unreachable
from tests.support.findings import warnings_of

MakeConfig = Callable[..., RftConfig]


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_mode_train_needs_the_tasks_of_the_rounds(make_config: MakeConfig) -> None:
    config = make_config(mode="train", buffer__train_batch_size=4, buffer__explorer_input__taskset=None)
    with pytest.raises(UserError, match="mode train trains on the rounds of a project"):
        refuse(settings_findings(resolve(config), Machine(2, 0)))
    refuse(settings_findings(resolve(make_config(mode="train", buffer__train_batch_size=4)), Machine(2, 0)))


def test_the_error_names_services_that_do_not_answer(make_config: MakeConfig, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}/v1"
    judge = {"model": {"base_url": url, "model": "m"}}
    config = make_config(
        registry__tracking_uri=f"http://127.0.0.1:{closed_port}",
        explorer__auxiliary_models=[{"name": "other", "base_url": url, "model": "m"}],
        buffer__explorer_input__taskset__judge="llm",
        buffer__explorer_input__taskset__judge_args=judge,
    )
    lines = [finding.text for finding in unreachable(config)]
    assert [line.partition(" http")[0].partition(" (")[0] for line in lines] == [
        "registry.tracking_uri", "explorer.auxiliary_models[0].base_url", "judge_args.model.base_url",
    ]  # fmt: skip
    assert all(f"nothing answers at 127.0.0.1:{closed_port}" in line for line in lines)


def test_services_that_answer_and_local_stores_are_accepted(make_config: MakeConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert list(unreachable(make_config(registry__tracking_uri=uri))) == []
    assert list(unreachable(make_config(registry__tracking_uri="sqlite:////tmp/store.db"))) == []


def test_the_error_names_a_port_out_of_range(make_config: MakeConfig) -> None:
    (line,) = unreachable(make_config(registry__tracking_uri="http://localhost:99999"))
    assert line.text.startswith("registry.tracking_uri http://localhost:99999: Port out of range")


def test_the_environment_replaces_the_configured_registry(
    make_config: MakeConfig, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    (line,) = unreachable(make_config(registry__tracking_uri="http://localhost:99999"))
    assert line.text.startswith("MLFLOW_TRACKING_URI http://127.0.0.1")


def test_a_service_behind_a_proxy_is_not_tried(
    make_config: MakeConfig, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert list(unreachable(make_config(registry__tracking_uri=f"http://127.0.0.1:{closed_port}"))) == []


@pytest.mark.slow
def test_a_workflow_is_imported_by_the_interpreter_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import sys\n"
        "assert not any('s3cret' in word for word in sys.orig_argv)\n"
        "def solve(task, model): ...\n"
        "class Agent:\n"
        "    def __init__(self, key): self.key = key\n"
        "    async def run(self, task, model, auxiliary_models=None): ...\n"
    )
    check_importable(WorkerWorkflow(f"{file}:solve", python=sys.executable))
    check_importable(WorkerWorkflow(f"{file}:Agent", {"key": "s3cret"}, python=sys.executable))
    with pytest.raises(UserError, match=r"workflow_args \['key'\] given, but only a class can take them"):
        check_importable(WorkerWorkflow(f"{file}:solve", {"key": "s3cret"}, python=sys.executable))
    with pytest.raises(UserError, match=r"has no 'other' \(explorer.workers.python"):
        check_importable(WorkerWorkflow(f"{file}:other", python=sys.executable))
    with pytest.raises(UserError, match="cannot be run"):
        check_importable(WorkerWorkflow(f"{file}:solve", python=str(tmp_path / "nowhere")))
    monkeypatch.syspath_prepend(tmp_path)  # as the folder of a script is
    check_importable(WorkerWorkflow("agent:solve", python=sys.executable))


def test_the_address_of_the_service_has_no_effect_on_other_modes() -> None:
    lines = warnings_of(build_config({"explorer": {"proxy_port": 9000}}))
    assert any(line.startswith("explorer.proxy_port has no effect here") for line in lines)
    assert not any("proxy_port" in line for line in warnings_of(build_config({"mode": "serve"})))
