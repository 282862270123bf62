"""The daemon reloads its workspace as soon as one of its code servers has died."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from dagster._daemon import controller

from rft_platform.jobs.dagster_internals.daemon_patches import replace_dead_code_servers


@pytest.fixture
def registry(monkeypatch):
    """A registry of one code server (any process stands for it), and the controller's method put back afterwards."""
    daemon = controller.DagsterDaemonController
    monkeypatch.setattr(daemon, "check_workspace_freshness", daemon.check_workspace_freshness)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    entry = SimpleNamespace(process=SimpleNamespace(server_process=process))
    reloads: list[str] = []
    yield SimpleNamespace(
        process=process,
        reloads=reloads,
        _active_entries={"location": entry, "broken": SimpleNamespace(error="no module")},
        clear_all_grpc_endpoints=lambda: reloads.append("cleared"),
    )
    process.kill()
    process.wait()


def test_a_dead_code_server_is_replaced_at_once_and_a_living_one_is_left_alone(registry):
    replace_dead_code_servers()
    refreshed: list[float] = []
    daemon = SimpleNamespace(
        _grpc_server_registry=registry,
        _workspace_process_context=SimpleNamespace(refresh_workspace=lambda: refreshed.append(time.time())),
    )
    check, now = controller.DagsterDaemonController.check_workspace_freshness, time.time()
    assert check(daemon, now) == now
    assert not refreshed
    registry.process.kill()
    registry.process.wait()
    assert check(daemon, now) > now
    assert registry.reloads == ["cleared"]
    assert len(refreshed) == 1
