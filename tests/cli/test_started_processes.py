"""At its end a command stops the processes that it started itself, and no process that another command started."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from rft_platform.common.processes.lease import read_lease
from rft_platform.common.processes.spawn import start_detached, wait_for_lease, wait_until_ended
from rft_platform.common.processes.strays import lease_environment, started_for
from rft_platform.config.home import Home
from rft_platform.driver.run import started_processes_end

#: argv: the lease to write; none: the process ends up without a lease, like one whose start takes long.
SERVER = """
import os, sys, time
from pathlib import Path
import psutil
from rft_platform.common.processes.lease import Lease, write_lease
if len(sys.argv) > 1:
    created = psutil.Process().create_time()
    write_lease(Path(sys.argv[1]), Lease("test", os.getpid(), created, "127.0.0.1", 1, "secret", "", created, {}))
time.sleep(600)
"""

#: Another command: starts a server when a line arrives, and ends at the next line. argv: home, lease, "leased" or not.
OTHER = """
import os, sys
from pathlib import Path
from rich.console import Console
sys.path.insert(0, sys.argv[1])
from test_started_processes import start
from rft_platform.config.home import Home
from rft_platform.driver.run import started_processes_end
with started_processes_end(Home(Path(sys.argv[2])), Console(file=sys.stderr)):
    sys.stdin.readline()
    print(start(Path(sys.argv[3]), sys.argv[4] == "leased").pid, flush=True)
    sys.stdin.readline()
"""


def start(lease: Path, leased: bool = True) -> psutil.Process:
    """Start a server for ``lease`` as engines and trainers are started."""
    log = lease.parent.parent / "logs" / f"{lease.stem}.log"
    arguments = [str(lease)] if leased else []
    process = start_detached([sys.executable, "-c", SERVER, *arguments], log, os.environ | lease_environment(lease))
    if leased:
        wait_for_lease(lease, process, 60, log)
    return process


@contextmanager
def other_command(home: Home, lease: Path, leased: bool) -> Iterator["subprocess.Popen[str]"]:
    arguments = [str(Path(__file__).parent), str(home.root), str(lease), "leased" if leased else "starting"]
    command = [sys.executable, "-c", OTHER, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; a zombie has."""
    return bool(wait_until_ended([process], 0))


def send(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.leases.mkdir(parents=True)
    yield home
    for lease in ("engine.json", "trainer.json"):
        for process in started_for(home.leases / lease):
            process.kill()


@pytest.mark.parametrize("leased", [True, False], ids=["with its lease", "while it starts"])
def test_what_another_command_started_meanwhile_is_left_alone(home: Home, leased: bool) -> None:
    console = Console(quiet=True)
    with other_command(home, home.leases / "trainer.json", leased) as other:
        with started_processes_end(home, console):
            mine = start(home.leases / "engine.json")
            send(other)  # the first command waits for a pool, the other one has it
            assert other.stdout is not None
            theirs = psutil.Process(int(other.stdout.readline()))
        assert not runs(mine)
        assert read_lease(home.leases / "engine.json") is None
        assert runs(theirs)
        send(other)
        assert other.wait(60) == 0
        assert not runs(theirs)


def test_what_ran_before_and_what_is_detached_keeps_running(home: Home) -> None:
    console = Console(quiet=True)
    before = start(home.leases / "engine.json")
    with started_processes_end(home, console, detach=True):
        detached = start(home.leases / "trainer.json")
    with started_processes_end(home, console):
        pass
    assert runs(before)
    assert runs(detached)


def test_blocks_in_one_process_each_end_their_own(home: Home) -> None:
    console = Console(quiet=True)
    with started_processes_end(home, console):
        outer = start(home.leases / "engine.json")
        with started_processes_end(home, console):
            inner = start(home.leases / "trainer.json")
        assert not runs(inner)
        assert runs(outer)
    assert not runs(outer)
