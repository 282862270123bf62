"""Servers that live as long as the command: ready before they are named, gone afterwards, each death told."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import Result

from rft_platform.cluster.interface import Service
from rft_platform.cluster.local import supervisor
from rft_platform.cluster.local.processes import free_port, wait_until_ended
from rft_platform.cluster.local.supervisor import Children, Server, failing_servers, serving, wait_for_end
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run import machine
from rft_platform.servers.ports import Port, check_ports, port_is_free
from rft_platform.servers.ui_servers import answers, ui_ports

# A server with its own child, as web servers with workers are.
_WITH_A_WORKER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
from http.server import HTTPServer, SimpleHTTPRequestHandler
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


Make = Callable[..., Server]


@pytest.fixture
def server(tmp_path: Path) -> Make:
    """``server(program)``: a server of these lines of Python."""

    def make(
        program: str, is_ready: Callable[[], bool] = lambda: True, port: int | None = None, name: str = "Web",
        **options: Any,
    ) -> Server:  # fmt: skip
        (tmp_path / f"program_{name}.py").write_text(program)
        arguments = () if port is None else (str(port),)
        service = Service(name, f"program_{name}", arguments, env={"PYTHONPATH": str(tmp_path)})
        return Server(service, is_ready, **options)

    return make


def test_a_server_answers_inside_the_block_and_ends_with_its_children(tmp_path: Path, server: Make) -> None:
    port = free_port()
    web = server(_WITH_A_WORKER, answers(f"http://127.0.0.1:{port}"), port)

    with serving([web], tmp_path) as children:
        assert httpx.get(f"http://127.0.0.1:{port}", trust_env=False).is_success
        family = [psutil.Process(children[0].process.pid), *psutil.Process(children[0].process.pid).children()]
        assert len(family) == 2
        with pytest.raises(UserError, match=f"port {port} is taken"):
            check_ports([Port(port, "Web", "--port")])

    assert wait_until_ended(family, 0) == []
    assert port_is_free(port)


def test_a_server_that_dies_is_named_with_the_end_of_its_log_and_the_rest_is_stopped(
    tmp_path: Path, server: Make
) -> None:
    lasting = server("import time; time.sleep(600)", name="Lasting")
    dying = server("import sys; sys.stdin.read(); print('out of luck'); sys.exit(3)")

    with (
        pytest.raises(RftError, match=r"Web ended with exit code 3; .*\n  out of luck"),
        serving([lasting, dying], tmp_path) as children,
    ):
        wait_for_end(children)

    assert not any(psutil.pid_exists(child.process.pid) for child in children)


def test_a_server_that_is_killed_while_the_others_start_is_started_again(tmp_path: Path, server: Make) -> None:
    killed_once = """
import os, pathlib, time
first, second = pathlib.Path("FOLDER/first"), pathlib.Path("FOLDER/second")
if not first.exists():
    first.touch()
    os.kill(os.getpid(), 9)
second.touch()
time.sleep(600)
""".replace("FOLDER", str(tmp_path))
    ready = (tmp_path / "second").exists
    with serving([server(killed_once, ready, restarts=True)], tmp_path) as children:
        assert len(children.deaths["Web"]) == 1
    (tmp_path / "first").unlink()
    (tmp_path / "second").unlink()
    with pytest.raises(RftError, match="ended with exit code -9"), serving([server(killed_once, ready)], tmp_path):
        pytest.fail("a server that may not be started again ended")


@pytest.mark.slow
def test_what_a_killed_server_leaves_behind_is_ended_too(tmp_path: Path, server: Make) -> None:
    port = free_port()
    web = server(_WITH_A_WORKER, answers(f"http://127.0.0.1:{port}"), port)

    with pytest.raises(RftError, match="ended with exit code -9"), serving([web], tmp_path) as children:
        (worker,) = psutil.Process(children[0].process.pid).children()
        children[0].process.kill()
        wait_for_end(children)

    gone, _ = psutil.wait_procs([worker], timeout=10)
    assert gone or worker.status() == psutil.STATUS_ZOMBIE  # ended, though nobody may have reaped it


def test_a_port_that_this_home_serves_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    command = [sys.executable, "-c", f"{listen}; time.sleep(60)"]
    with subprocess.Popen(
        command, env={**os.environ, "RFT_HOME": str(home.root)}, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        monkeypatch.setattr(machine, "_PORTS", {port: ("the Dagster interface", "take another")})
        own, others = (
            next(machine.port_findings(home)),
            next(machine.port_findings(Home(tmp_path / "other"))),
        )
        server.kill()
    assert (own.level, own.text) == ("note", f"{port} serves the Dagster interface of this project (pid {server.pid})")
    assert others.level == "warning"


def test_ports_are_checked_before_anything_starts() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = f"port {port} is taken: free it, or choose another one for Web with --web-port"
        with pytest.raises(UserError, match=taken):
            check_ports([Port(port, "Web", "--web-port")])
    with pytest.raises(UserError, match=f"port {port} is used twice, for Web and Files: .* with --files-port"):
        check_ports([Port(port, "Web", "--web-port"), Port(port, "Files", "--files-port")])


@pytest.mark.slow
def test_a_server_that_ends_again_and_again_is_restarted_with_pauses(
    tmp_path: Path, server: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_WAIT_S", 2.0)
    monkeypatch.setattr(supervisor, "_STABLE_S", 1.0)
    healed = tmp_path / "healed"
    program = f"""
import pathlib, sys, time
time.sleep(0.5)
if pathlib.Path({str(healed)!r}).exists():
    time.sleep(600)
print("no database")
sys.exit(3)
"""
    lasting = server("import time; time.sleep(600)")
    reports: list[str] = []
    failing: list[list[str]] = []

    def report(line: str) -> None:
        reports.append(line)
        failing.append(failing_servers(tmp_path))
        if len(reports) == 4:
            healed.touch()

    def end_when_healed(children: Children) -> None:
        deadline = time.monotonic() + 30
        while not healed.exists() or failing_servers(tmp_path):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        reports.append(f"{[child.process.poll() for child in children]}")
        children[0].process.kill()  # not to be restarted: its end ends the watch

    with serving([lasting, server(program, restarts=True, name="Loop")], tmp_path) as children:
        log = children[1].log
        ending = threading.Thread(target=end_when_healed, args=(children,))
        ending.start()
        with pytest.raises(RftError, match="Web ended with exit code -9"):
            wait_for_end(children, report)
        ending.join()
    assert failing[:3] == [[], [], []]
    (message,) = failing[3]
    assert message.startswith("Loop ended with exit code 3, 4 times in ten minutes: started again in 2 s; the end of ")
    assert message.endswith("no database")
    assert reports.pop() == "[None, None]"
    ended = "Loop ended with exit code 3"
    assert reports == [f"{ended}: started again, see {log}"] * 3 + [
        f"{ended}, 4 times in ten minutes: started again in 2 s, see {log}"
    ]


def test_the_waits_before_restarts_grow_to_a_minute_and_forget_old_failures() -> None:
    assert [supervisor.wait_before_restart(count) for count in (1, 3, 4, 5, 7, 8, 100)] == [0, 0, 5, 10, 40, 60, 60]
    assert supervisor.recent([0.0, 400.0, 900.0], 1000.0) == [900.0]


def test_work_of_a_dead_server_is_completed(tmp_path: Path, server: Make) -> None:
    started = tmp_path / "started"
    program = f"""
import pathlib, subprocess, sys, time
file = pathlib.Path({str(started)!r})
if not file.exists():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    file.write_text(str(worker.pid))
time.sleep(600)
"""
    leaving = server(program, started.exists, restarts=True, leaves_work=True)

    with serving([leaving], tmp_path) as children:
        while not started.read_text():
            time.sleep(0.01)
        worker = psutil.Process(int(started.read_text()))
        first = children[0].process
        first.kill()
        first.wait()
        children.start_again(0)
        assert children[0].process.pid != first.pid
        assert worker.is_running()
        assert worker.status() != psutil.STATUS_ZOMBIE

    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("option", ["--port", "--mlflow-port", "--metrics-port"])
def test_a_taken_port_is_refused_before_anything_is_written(
    home: Home, rft: Callable[..., Result], write_config: Callable[..., Path], option: str
) -> None:
    ports = {"--port": free_port(), "--mlflow-port": free_port()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports[option] = other.getsockname()[1]
        options = [str(word) for pair in ports.items() for word in pair]
        refused = rft("ui", "--config", str(write_config()), *options)
    assert refused.exit_code == 2
    assert f"error: port {ports[option]} is taken" in refused.stderr
    assert f"with {option}" in refused.stderr
    assert not home.root.exists()


@pytest.mark.parametrize(
    ("mode", "taken", "refused"),
    [
        ("both", "--port", "Dagster with --port"),
        ("both", "--mlflow-port", "MLflow with --mlflow-port"),
        ("serve", "proxy_port", "the service with explorer.proxy_port"),
    ],
)
def test_the_ports_of_the_online_service_are_checked_first(
    home: Home, rft: Callable[..., Result], write_config: Callable[..., Path], mode: str, taken: str, refused: str
) -> None:
    ports = {"--port": free_port(), "--mlflow-port": free_port(), "proxy_port": free_port()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports[taken] = other.getsockname()[1]
        config = write_config(mode=mode, explorer={"proxy_port": ports.pop("proxy_port")})
        options = [str(word) for pair in ports.items() for word in pair]
        result = rft("serve", "--config", str(config), *options)
    assert result.exit_code == 2
    assert "is taken: free it, or choose another one for " + refused in result.stderr
    assert not home.root.exists()


def test_an_mlflow_server_elsewhere_needs_no_port_here(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    config = load_config(write_config(registry={"tracking_uri": "http://mlflow.example:5000"}))
    assert [port.server for port in ui_ports(Home(tmp_path / "home"), config, 3000, 3000, 9464)] == [
        "Dagster",
        "metrics",
    ]
