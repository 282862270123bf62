"""A file system fault for the daemon is in force when the daemon starts."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from chaos import daemon_mode
from chaos.daemon_mode import DaemonMode
from chaos.io_faults import IoFaults
from chaos.scratch import Scratch
from chaos.syscall_faults import SyscallFault
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.supervisor import serving
from rft_platform.config.home import Home


@pytest.mark.slow
def test_the_daemon_restarts_with_its_fault_in_force(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_mode, "_PLAN_S", float("inf"))
    monkeypatch.setattr(daemon_mode, "_TURN_S", -1.0)
    home, struck, rules = Home(tmp_path / "home"), tmp_path / "struck", tmp_path / "home.rules"
    fault = SyscallFault("write", error="EIO", process="dagster-daemon run", once=struck)
    mode = DaemonMode(
        cast(Scratch, SimpleNamespace(home=lambda name: home)), faults=IoFaults(tmp_path, home.root, [fault], "daemon")
    )
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)")
    service = Service("daemon", "sleeper", env={"PYTHONPATH": str(tmp_path)}, is_ready=lambda: True)
    with serving(home.own_servers, [service]) as mode._supervisor:
        first = pid(home)
        mode.maintain()
        wait_for(lambda: pid(home) not in (None, first))
        assert "dagster-daemon run" in rules.read_text()
        second = pid(home)
        mode.maintain()
        assert mode.ended == [], "the end of the daemon was expected"
        assert pid(home) == second, "the daemon has time to make the call"

        struck.touch()
        mode.maintain()
        assert rules.read_text() == ""
        time.sleep(1.0)
        assert pid(home) == second


def pid(home: Home) -> int | None:
    address = home.own_servers.find("daemon")
    return None if address is None else int(address.details["pid"])


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "the daemon was not restarted in time"
        time.sleep(0.05)
