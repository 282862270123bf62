"""At its end a command stops the processes that it used, unless another one uses them or no command started them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from rft_platform.cluster.local.leases import lease_environment, note_use, read_lease, release, started_for
from rft_platform.cluster.local.local_cluster import wait_for_lease
from rft_platform.cluster.local.locks import locked
from rft_platform.cluster.local.processes import start_detached, wait_until_ended
from rft_platform.config.home import Home
from rft_platform.run.start import used_processes_end

#: argv: the lease to write; none: the process ends up without a lease, like one whose start takes long.
SERVER = """
import os, sys, time
from pathlib import Path
import psutil
from rft_platform.cluster.local.leases import Lease, write_lease
if len(sys.argv) > 1:
    created = psutil.Process().create_time()
    write_lease(Path(sys.argv[1]), Lease("test", os.getpid(), created, "127.0.0.1", 1, "secret", "", created, {}))
time.sleep(600)
"""

#: Another command: starts or finds a server when a line arrives, and ends at the next line. argv: home, lease, how.
OTHER = """
import os, sys
from pathlib import Path
from rich.console import Console
sys.path.insert(0, sys.argv[1])
from test_started_processes import find, start
from rft_platform.config.home import Home
from rft_platform.run.start import used_processes_end
with used_processes_end(Home(Path(sys.argv[2])), Console(file=sys.stderr)):
    sys.stdin.readline()
    how, lease = sys.argv[4], Path(sys.argv[3])
    print((find(lease) if how == "found" else start(lease, how == "leased")).pid, flush=True)
    sys.stdin.readline()
"""


#: A command that uses an engine when it starts and again before it ends. argv: home, model.
WITH_ENGINE = """
import sys
from pathlib import Path
from rich.console import Console
from rft_platform.config.home import Home
from rft_platform.run.start import used_processes_end
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
home = Home(Path(sys.argv[1]))
with used_processes_end(home, Console(file=sys.stderr)):
    with find_or_start_engine(Path(sys.argv[2]), home.cluster, EngineSpec(device="cpu")) as engine:
        print(engine.status().pid, flush=True)
        sys.stdin.readline()
        print(engine.status().pid, flush=True)
"""


def start(lease: Path, leased: bool = True) -> psutil.Process:
    """Start a server for ``lease`` as engines and trainers are started."""
    log = lease.parent.parent / "logs" / f"{lease.stem}.log"
    arguments = [str(lease)] if leased else []
    with locked(lease):
        note_use(lease)
        process = start_detached([sys.executable, "-c", SERVER, *arguments], log, os.environ | lease_environment(lease))
        if leased:
            wait_for_lease(lease, process, 60, log)
    return process


def find(lease: Path) -> psutil.Process:
    """The running server of ``lease``, found as engines and trainers are found."""
    with locked(lease):
        note_use(lease)
        held = read_lease(lease)
    assert held is not None
    return psutil.Process(held.pid)


@contextmanager
def other_command(home: Home, lease: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    """A second command on the home, which starts ("leased", "starting") or finds ("found") the server of ``lease``."""
    arguments = [str(Path(__file__).parent), str(home.root), str(lease), how]
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


def server_of(other: "subprocess.Popen[str]") -> psutil.Process:
    """Let the other command start or find its server."""
    send(other)
    assert other.stdout is not None
    return psutil.Process(int(other.stdout.readline()))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.leases.mkdir(parents=True)
    yield home
    for lease in ("engine.json", "trainer.json"):
        for process in started_for(home.leases / lease):
            process.kill()


@pytest.mark.parametrize("how", ["leased", "starting"])
def test_what_another_command_started_meanwhile_is_left_alone(home: Home, how: str) -> None:
    console = Console(quiet=True)
    with other_command(home, home.leases / "trainer.json", how) as other:
        with used_processes_end(home, console):
            mine = start(home.leases / "engine.json")
            theirs = server_of(other)
        assert not runs(mine)
        assert read_lease(home.leases / "engine.json") is None
        assert runs(theirs)
        send(other)
        assert other.wait(60) == 0
        assert not runs(theirs)


def test_the_last_of_two_commands_ends_what_the_first_one_started(home: Home) -> None:
    console = Console(quiet=True)
    with other_command(home, home.leases / "engine.json", "found") as other:
        with used_processes_end(home, console):
            engine = start(home.leases / "engine.json")
            assert server_of(other) == engine
        assert runs(engine), "the other command uses it"
        send(other)
        assert other.wait(60) == 0
    assert not runs(engine)
    assert read_lease(home.leases / "engine.json") is None


def test_a_killed_command_is_no_user_and_the_next_one_ends_what_it_started(home: Home) -> None:
    console = Console(quiet=True)
    with other_command(home, home.leases / "engine.json", "leased") as other:
        with used_processes_end(home, console):
            engine = server_of(other)
            assert find(home.leases / "engine.json") == engine
            other.kill()
            other.wait()
        assert not runs(engine)


def test_what_no_command_started_and_what_is_detached_keeps_running(home: Home) -> None:
    console = Console(quiet=True)
    before = start(home.leases / "engine.json")
    release(home.leases / "engine.json")
    with used_processes_end(home, console, detach=True):
        detached = start(home.leases / "trainer.json")
    with used_processes_end(home, console):
        assert find(home.leases / "engine.json") == before
        assert find(home.leases / "trainer.json") == detached
    assert runs(before)
    assert runs(detached)


def test_blocks_in_one_process_each_end_their_own(home: Home) -> None:
    console = Console(quiet=True)
    with used_processes_end(home, console):
        outer = start(home.leases / "engine.json")
        with used_processes_end(home, console):
            inner = start(home.leases / "trainer.json")
            assert find(home.leases / "engine.json") == outer
        assert not runs(inner)
        assert runs(outer)
    assert not runs(outer)


@pytest.mark.slow
def test_two_commands_with_one_engine(home: Home, tiny_model: Path, tmp_path: Path) -> None:
    """Two real commands: the one that started the engine ends first, and the other one goes on with that engine."""
    commands = [
        subprocess.Popen([sys.executable, "-c", WITH_ENGINE, str(home.root), str(tiny_model)],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    pids = []
    for command in commands:
        assert command.stdout is not None
        pids.append(int(command.stdout.readline()))
    assert pids[0] == pids[1]
    starter = read_lease(home.leases / "engine.json")
    assert starter is not None and starter.started_by is not None
    commands.sort(key=lambda command: starter.started_by.split("-")[0] != str(command.pid))
    engine = psutil.Process(pids[0])
    for command, left in zip(commands, (True, False), strict=True):
        said, _ = command.communicate("\n", timeout=60)
        assert (command.returncode, said) == (0, f"{pids[0]}\n")
        assert runs(engine) is left
    assert read_lease(home.leases / "engine.json") is None
