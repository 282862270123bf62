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

from rft_platform.cluster.interface import Service, StartError
from rft_platform.cluster.local import supervisor
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.cluster.local.supervisor import failing_servers, serving
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run import machine
from rft_platform.servers.ports import Port, check_ports, port_is_free
from rft_platform.servers.ui_servers import answers, ui_ports
from tests.support.ports import free_port

# A server with its own child, as web servers with workers are.
_WITH_A_WORKER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
from http.server import HTTPServer, SimpleHTTPRequestHandler
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


Make = Callable[..., Service]


@pytest.fixture
def server(tmp_path: Path) -> Make:
    """``server(program)``: a server of these lines of Python."""

    def make(
        program: str, is_ready: Callable[[], bool] = lambda: True, port: int | None = None, name: str = "web",
        **options: Any,
    ) -> Service:  # fmt: skip
        (tmp_path / f"program_{name}.py").write_text(program)
        arguments = () if port is None else (str(port),)
        environment = {"PYTHONPATH": str(tmp_path)}
        return Service(name, f"program_{name}", arguments, env=environment, is_ready=is_ready, **options)

    return make


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path / "leases", tmp_path)


def process_of(cluster: LocalCluster, name: str) -> psutil.Process:
    address = cluster.find(name)
    assert address is not None
    return psutil.Process(address.details["pid"])


def test_a_server_answers_inside_the_block_and_ends_with_its_children(cluster: LocalCluster, server: Make) -> None:
    port = free_port()
    web = server(_WITH_A_WORKER, answers(f"http://127.0.0.1:{port}"), port)

    with serving(cluster, [web]):
        assert httpx.get(f"http://127.0.0.1:{port}", trust_env=False).is_success
        process = process_of(cluster, "web")
        family = [process, *process.children()]
        assert len(family) == 2
        with pytest.raises(UserError, match=f"port {port} is taken"):
            check_ports([Port(port, "Web", "--port")])

    assert wait_until_ended(family, 0) == []
    assert port_is_free(port)
    assert cluster.find("web") is None


def test_a_server_that_ends_while_it_starts_is_reported_with_its_log_and_the_rest_is_stopped(
    cluster: LocalCluster, server: Make
) -> None:
    lasting = server("import time; time.sleep(600)", name="lasting")
    dying = server("import sys; sys.stdin.read(); print('out of luck'); sys.exit(3)", lambda: False)

    with (
        pytest.raises(StartError, match=r"'web' ended \(exit code 3\) .*\n  out of luck"),
        serving(cluster, [lasting, dying]),
    ):
        pytest.fail("a server that ends by itself was not reported")

    assert cluster.services() == {}


def test_a_server_that_is_never_ready_is_reported_with_its_log(cluster: LocalCluster, server: Make) -> None:
    waiting = server("import time; print('loading', flush=True); time.sleep(600)", lambda: False, start_timeout_s=1.0)
    with pytest.raises(StartError, match=r"'web' was not ready after 1 s(?s:.*)loading"), serving(cluster, [waiting]):
        pytest.fail("a server that is not ready counts as started")


def test_a_server_that_is_killed_while_the_others_start_is_started_again(
    tmp_path: Path, cluster: LocalCluster, server: Make
) -> None:
    killed_once = """
import os, pathlib, time
first, second = pathlib.Path("FOLDER/first"), pathlib.Path("FOLDER/second")
if not first.exists():
    first.touch()
    os.kill(os.getpid(), 9)
second.touch()
time.sleep(600)
""".replace("FOLDER", str(tmp_path))
    with serving(cluster, [server(killed_once, (tmp_path / "second").exists)]) as supervisor:
        end = supervisor.ends.get_nowait()
        assert (end.name, end.exit_code) == ("web", -9)
        assert process_of(cluster, "web").pid != end.pid


def test_a_server_that_needs_no_token_ends_the_command(cluster: LocalCluster, server: Make) -> None:
    def is_open() -> bool:
        raise RftError("it answers without an access token")

    web = server("import time; time.sleep(600)", is_open)
    with pytest.raises(RftError, match="without an access token"), serving(cluster, [web]):
        pytest.fail("an open server counts as ready")
    assert cluster.stop_strays() == []


def test_a_silent_server_is_replaced(cluster: LocalCluster, server: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_PROBE_INTERVAL_S", 0.1)
    silent = threading.Event()
    web = server("import time; time.sleep(600)", lambda: not silent.is_set(), answer_s=0.5)
    with serving(cluster, [web]) as kept:
        first = process_of(cluster, "web")
        silent.set()
        wait_until_ended([first], 10)
        silent.clear()
        end = kept.ends.get(timeout=10)
        assert (end.pid, end.message.partition(",")[0]) == (first.pid, "web did not answer: started again")
        assert process_of(cluster, "web").pid != first.pid


@pytest.mark.slow
def test_what_a_killed_server_leaves_behind_is_ended_too(cluster: LocalCluster, server: Make) -> None:
    port = free_port()
    web = server(_WITH_A_WORKER, answers(f"http://127.0.0.1:{port}"), port)

    with serving(cluster, [web]) as kept:
        killed = process_of(cluster, "web")
        (worker,) = killed.children()
        killed.kill()
        end = kept.ends.get(timeout=10)
        assert (end.pid, end.exit_code) == (killed.pid, -9)
        assert wait_until_ended([worker], 10) == []


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
    tmp_path: Path, cluster: LocalCluster, server: Make, monkeypatch: pytest.MonkeyPatch
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
    lasting = server("import time; time.sleep(600)", name="lasting")
    reports: list[str] = []
    failing: list[list[str]] = []

    with serving(cluster, [lasting, server(program)]) as kept:
        first = process_of(cluster, "lasting")
        for _ in range(4):
            reports.append(kept.ends.get(timeout=20).message)
            failing.append(failing_servers(tmp_path))
        healed.touch()
        deadline = time.monotonic() + 30
        while failing_servers(tmp_path):
            assert time.monotonic() < deadline, "a server that runs again is reported as failing"
            time.sleep(0.1)
        assert process_of(cluster, "lasting") == first
        log = cluster.log_file("web")
    assert failing[:3] == [[], [], []]
    (message,) = failing[3]
    assert message.startswith("web ended with exit code 3, 4 times in ten minutes: started again in 2 s; the end of ")
    assert message.endswith("no database")
    ended = "web ended with exit code 3"
    assert reports == [f"{ended}: started again, see {log}"] * 3 + [
        f"{ended}, 4 times in ten minutes: started again in 2 s, see {log}"
    ]


def test_the_waits_before_restarts_grow_to_a_minute_and_forget_old_failures() -> None:
    assert [supervisor.wait_before_restart(count) for count in (1, 3, 4, 5, 7, 8, 100)] == [0, 0, 5, 10, 40, 60, 60]
    failures = supervisor.Failures([0.0, 400.0, 900.0])
    assert failures.add(1000.0) == 2 and failures.times == [900.0, 1000.0]


def test_work_of_a_dead_server_is_completed(tmp_path: Path, cluster: LocalCluster, server: Make) -> None:
    started = tmp_path / "started"
    program = f"""
import pathlib, subprocess, sys, time
file = pathlib.Path({str(started)!r})
if not file.exists():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    file.write_text(str(worker.pid))
time.sleep(600)
"""
    with serving(cluster, [server(program, started.exists, leaves_work=True)]) as kept:
        while not started.read_text():
            time.sleep(0.01)
        worker = psutil.Process(int(started.read_text()))
        first = process_of(cluster, "web")
        first.kill()
        assert kept.ends.get(timeout=10).pid == first.pid
        while (address := cluster.find("web")) is None or address.details["pid"] == first.pid:
            time.sleep(0.05)
        assert wait_until_ended([worker], 0) == [worker]

    assert wait_until_ended([worker], 0) == []


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
