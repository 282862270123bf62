"""Servers end with their command: by one signal in order, by a second one at once, and if the command is killed."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.cluster.local.supervisor import serving

#: A server with a child in its group and one in its own session, as a webserver and a daemon with a run have them.
SERVER = """
import os, pathlib, signal, subprocess, sys, time
from rft_platform.cluster.local.service_process import end_with_starter
end_with_starter()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = ["sleep", "600"]
own = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
pids = [os.getpid(), *(each.pid for each in own)]
file = pathlib.Path(sys.argv[1])
file.with_suffix(".new").write_text(" ".join(map(str, pids)))
file.with_suffix(".new").rename(file)
time.sleep(600)
"""
#: A command that serves until it is interrupted.
COMMAND = """
import os, pathlib, sys
from rft_platform.cluster.this_process import terminable
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.supervisor import serving
folder, *options = sys.argv[1:]
path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
services = [
    Service(name, "server", (str(pathlib.Path(folder, name)), *options), env={"PYTHONPATH": path},
            is_ready=pathlib.Path(folder, name).exists)
    for name in ("web", "daemon")
]
try:
    cluster = LocalCluster(pathlib.Path(folder, "leases"), pathlib.Path(folder))
    with terminable(), serving(cluster, services) as supervisor:
        supervisor.watch()
except KeyboardInterrupt:
    print("stopped")
"""


#: A command that starts a server of another package, prints its process id and waits.
SUPERVISED = """
import sys, time
from pathlib import Path
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.cluster.local.service_process import of_command
folder = Path(sys.argv[1])
module, arguments = of_command(("uvicorn", "--factory", "starlette.applications:Starlette", "--port", "0"))
cluster, log = LocalCluster(folder / "leases", folder), folder / "web.log"
serves = lambda: "running" in log.read_text()
service = Service("web", module, arguments, is_ready=serves, ends_with_starter=True)
print(cluster.ensure(service).details["pid"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder with the programs; processes that a failed test left behind end."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "command.py").write_text(COMMAND)
    yield tmp_path
    for process in started(tmp_path):
        if process.is_running():
            process.kill()


def started(folder: Path) -> list[psutil.Process]:
    """The processes that the servers in ``folder`` consist of, as far as they run."""
    files = [folder / name for name in ("web", "daemon") if (folder / name).exists()]
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def process_of(cluster: LocalCluster, name: str) -> psutil.Process:
    address = cluster.find(name)
    assert address is not None
    return psutil.Process(address.details["pid"])


def wait_for(what: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def start_in_background(folder: Path, *options: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """Start the command with the ``&`` of a script, which makes it ignore SIGINT; returns it and its servers."""
    line = shlex.join([sys.executable, str(folder / "command.py"), str(folder), *options])
    script = f"{line} > /dev/null 2>&1 & echo $!"
    command = psutil.Process(int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout))
    wait_for(lambda: len(started(folder)) == 6)
    return command, started(folder)


def test_a_server_ends_although_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall-clock time at which a process started changes with the clock of the machine."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)")
    service = Service("web", "sleeper", env={"PYTHONPATH": str(tmp_path)}, is_ready=lambda: True)
    cluster = LocalCluster(tmp_path / "leases", tmp_path)
    with serving(cluster, [service]):
        process = process_of(cluster, "web")
        booted = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600)
        assert psutil.Process(process.pid).create_time() > time.time() + 3000
    assert wait_until_ended([process], 0) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_ends_a_background_command_with_all_it_started(programs: Path, number: signal.Signals) -> None:
    command, servers = start_in_background(programs)
    command.send_signal(number)
    assert wait_until_ended([command, *servers], 15) == []


@pytest.mark.slow
def test_servers_that_ignore_the_signal_are_killed_within_15_seconds(programs: Path) -> None:
    command, servers = start_in_background(programs, "stubborn")
    command.terminate()
    assert wait_until_ended([command, *servers], 15) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_at_once(programs: Path, number: signal.Signals) -> None:
    command, servers = start_in_background(programs, "stubborn")
    command.terminate()
    time.sleep(1.0)
    assert command.is_running()
    command.send_signal(number)
    assert wait_until_ended([command, *servers], 3) == []


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_command(programs: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(programs / "command.py"), str(programs)])
    wait_for(lambda: len(started(programs)) == 6)
    family = [psutil.Process(pid), *started(programs)]
    os.close(terminal)
    assert wait_until_ended(family, 15) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("stubborn",)])
def test_the_servers_of_a_killed_command_end(programs: Path, options: tuple[str, ...]) -> None:
    command, servers = start_in_background(programs, *options)
    command.kill()
    assert wait_until_ended([command, *servers], 15) == []


@pytest.mark.slow
def test_a_command_of_another_package_ends_with_its_killed_starter(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    assert wait_until_ended([server], 15) == []
