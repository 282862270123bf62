"""A file system fault for the daemon is in force when the daemon starts."""

import os
import time
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from chaos import daemon_mode
from chaos.daemon_mode import DaemonMode
from chaos.io_faults import IoFaults
from chaos.scratch import Scratch
from chaos.syscall_faults import SyscallFault
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import command_of
from rft_platform.cluster.local.supervisor import Child, Children, Server
from rft_platform.config.home import Home


def test_the_daemon_restarts_with_its_fault_in_force(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_mode, "_PLAN_S", float("inf"))
    monkeypatch.setattr(daemon_mode, "_TURN_S", -1.0)
    home, struck, rules = Home(tmp_path / "home"), tmp_path / "struck", tmp_path / "home.rules"
    fault = SyscallFault("write", error="EIO", process="dagster-daemon run", once=struck)
    mode = DaemonMode(
        cast(Scratch, SimpleNamespace(home=lambda name: home)), faults=IoFaults(tmp_path, home.root, [fault], "daemon")
    )
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)")
    service = Service("daemon", "sleeper", env={"PYTHONPATH": str(tmp_path)})
    server = Server(service, is_ready=lambda: True, restarts=True)
    first = psutil.Popen(command_of(service), env={**os.environ, **service.env}, start_new_session=True)
    mode._children = children = Children()
    children.append(Child(server, first, time.monotonic(), tmp_path / "daemon.log"))

    mode.maintain()
    assert first.wait(10) == -15
    assert "dagster-daemon run" in rules.read_text()

    try:
        mode.maintain()
        assert children[0].process.pid != first.pid
        assert mode.ended == [], "the end of the daemon was expected"
        mode.maintain()
        assert children[0].process.poll() is None, "the daemon has time to make the call"

        struck.touch()
        mode.maintain()
        assert rules.read_text() == ""
        assert children[0].process.poll() is None
    finally:
        children[0].process.kill()
        children[0].process.wait()
