"""Leases and detached processes, with real processes."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rft_platform.cluster.interface import Group, Service, StartError
from rft_platform.cluster.local import local_cluster
from rft_platform.cluster.local.leases import Lease, lease_environment, read_lease, remove_lease, write_lease
from rft_platform.cluster.local.local_cluster import command_of, wait_for_lease
from rft_platform.cluster.local.locks import locked
from rft_platform.cluster.local.processes import find_process, start_detached, stop_process, wait_until_ended
from rft_platform.cluster.local.service_process import LIFELINE_VARIABLE

READY = """
import os, psutil, signal, sys, time
from pathlib import Path
from rft_platform.cluster.local.leases import Lease, write_lease
{before}
me = psutil.Process()
write_lease(Path(sys.argv[1]), Lease("test", me.pid, me.create_time(), "127.0.0.1", 1, "secret", "", time.time(), {{}}))
print("ready", flush=True)
signal.pause()
"""

#: Starts a process in its own session, which leaves a word when it is told to end.
APART = """
import subprocess
polite = '''
import pathlib, signal
def farewell(*_):
    pathlib.Path({said!r}).write_text("bye")
    raise SystemExit
signal.signal(signal.SIGTERM, farewell)
print("listening", flush=True)
signal.pause()
'''
apart = subprocess.Popen([sys.executable, "-c", polite], stdout=subprocess.PIPE, start_new_session=True)
apart.stdout.readline()
"""


def a_lease(pid: int | None = None, create_time: float | None = None) -> Lease:
    me = psutil.Process()
    return Lease("test", pid or me.pid, create_time or me.create_time(), "127.0.0.1", 1, "secret", "d", 0.0, {"k": [1]})


def start(tmp_path: Path, code: str) -> psutil.Process:
    command = [sys.executable, "-c", code, str(tmp_path / "lease.json")]
    environment = os.environ | lease_environment(tmp_path / "lease.json")
    return start_detached(command, tmp_path / "child.log", environment)


def test_lease_round_trip_is_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "leases" / "engine.json"
    write_lease(path, a_lease())
    assert read_lease(path) == a_lease()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(read_lease(path))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "x"}'])
def test_an_unreadable_lease_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lease.json"
    assert read_lease(path) is None
    path.write_text(content)
    assert read_lease(path) is None


def test_only_the_owner_removes_its_lease(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    write_lease(path, a_lease())
    remove_lease(path, os.getpid() + 1)
    assert path.exists()
    remove_lease(path, os.getpid())
    assert not path.exists()
    remove_lease(path, os.getpid())


def test_alive_needs_the_same_pid_and_creation_time() -> None:
    assert a_lease().alive
    assert not a_lease(create_time=psutil.Process().create_time() - 60).alive
    assert not a_lease(pid=2**22 + 1).alive


def _hold(path: Path, log: Path) -> None:
    for _ in range(20):
        with locked(path):
            before = log.read_text()
            time.sleep(0.0005)
            log.write_text(before + "x")


def test_lock_excludes_other_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    context = multiprocessing.get_context("spawn")
    holders = [context.Process(target=_hold, args=(tmp_path / "lease.json", log)) for _ in range(2)]
    for holder in holders:
        holder.start()
    for holder in holders:
        holder.join()
    assert log.read_text() == "x" * 40


def test_start_wait_and_stop(tmp_path: Path) -> None:
    process = start(tmp_path, READY.format(before=""))
    lease = wait_for_lease(tmp_path / "lease.json", process, 30, tmp_path / "child.log")
    assert lease.pid == process.pid and lease.alive
    assert os.getsid(process.pid) == process.pid
    stop_process(process, 5)
    assert not lease.alive
    assert not psutil.pid_exists(process.pid)  # reaped, too


def test_a_deaf_process_is_killed_with_its_children(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork()"
    process = start(tmp_path, READY.format(before=deaf))
    lease = wait_for_lease(tmp_path / "lease.json", process, 30, tmp_path / "child.log")
    child = process.children()[0]
    stop_process(process, 0.2)
    assert not lease.alive
    assert find_process(process.pid, process.create_time()) is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_descendants_in_another_session_are_listed_after_the_process(tmp_path: Path) -> None:
    process = start(tmp_path, READY.format(before=APART.format(said=str(tmp_path / "said"))))
    wait_for_lease(tmp_path / "lease.json", process, 30, tmp_path / "child.log")
    family = [process, *process.children()]
    began = time.monotonic()
    stop_process(process, 20)
    assert time.monotonic() - began < 10
    assert len(family) == 2 and wait_until_ended(family, 0) == []
    assert (tmp_path / "said").read_text() == "bye"


#: A script that starts a service in its own group, as a shell without job control does; ends when its input ends.
SCRIPT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
sys.stdin.read()
"""


def test_the_script_that_a_service_was_started_in_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    command = [sys.executable, "-c", SCRIPT, READY.format(before="os.fork()"), str(path)]
    environment = os.environ | lease_environment(path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as script:
        (service,) = _wait_for_children(psutil.Process(script.pid))
        lease = wait_for_lease(path, service, 30, tmp_path / "child.log")
        family = [service, *_wait_for_children(service)]
        assert os.getpgid(lease.pid) == script.pid
        stop_process(service, 5)
        assert wait_until_ended(family, 0) == []
        assert script.communicate() == (None, None) and script.returncode == 0, "it was not signalled"


def _wait_for_children(process: psutil.Process) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    while not (found := process.children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_ending_one_stubborn_process_does_not_wait_for_one_in_another_session(tmp_path: Path) -> None:
    both = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.fork() == 0: os.setsid()"
    process = start(tmp_path, READY.format(before=both))
    wait_for_lease(tmp_path / "lease.json", process, 30, tmp_path / "child.log")
    (apart,) = process.children()
    stopping = threading.Thread(target=stop_process, args=(process, 1.0))
    stopping.start()
    assert wait_until_ended([process], 1.6) == []
    assert wait_until_ended([apart], 0) == [apart], "each process has its own time limit"
    stopping.join()
    assert wait_until_ended([apart], 0) == []


def test_a_detached_process_holds_on_to_no_file_of_its_starter(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    process = start(tmp_path, READY.format(before=""))
    try:
        wait_for_lease(tmp_path / "lease.json", process, 30, tmp_path / "child.log")
        os.close(writing)
        assert os.read(reading, 1) == b""  # nobody else could write
    finally:
        os.close(reading)
        stop_process(process, 5)


def test_a_process_that_ends_early_is_reported_at_once_with_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "print('starting'); raise SystemExit('no tokenizer in the model folder')")
    with pytest.raises(StartError, match=r"exit code 1\)(?s:.*)no tokenizer in the model folder"):
        wait_for_lease(tmp_path / "lease.json", process, 60, tmp_path / "child.log")


def test_waiting_ends_after_the_time_limit(tmp_path: Path) -> None:
    write_lease(tmp_path / "lease.json", a_lease())  # older than the process: not its own
    process = start(tmp_path, "import signal; signal.pause()")
    try:
        with pytest.raises(StartError, match="not ready after"):
            wait_for_lease(tmp_path / "lease.json", process, 0.1, tmp_path / "child.log")
    finally:
        stop_process(process, 5)


def test_a_process_that_is_stopped_while_it_starts_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "STOPPED_S", 0.0)
    process = start(tmp_path, "import signal; signal.pause()")
    try:
        process.suspend()
        with pytest.raises(StartError, match=r"was stopped \(SIGSTOP\) while it started"):
            wait_for_lease(tmp_path / "lease.json", process, 60, tmp_path / "child.log")
    finally:
        stop_process(process, 5)


def test_a_node_that_waits_for_its_group_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """It has no rank yet, and the first node will never answer."""
    lifeline = tmp_path / "lifeline"
    os.mkfifo(lifeline)
    held = os.open(lifeline, os.O_RDWR | os.O_CLOEXEC)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = Group(1, 2, f"127.0.0.1:{silent.getsockname()[1]}")
        command = command_of(Service("waiting", "tests.cluster.echo_service", group=group), node_rank=1)
        node = start_detached(command, tmp_path / "log", {**os.environ, LIFELINE_VARIABLE: str(lifeline)})
        try:
            silent.settimeout(60)
            connection, _ = silent.accept()  # torchrun looks for the first node
            os.close(held)
            assert wait_until_ended([node], 10) == []
            connection.close()
        finally:
            stop_process(node, timeout_s=0.1)


FOREGROUND = """
import os, sys
from rft_platform.cluster.local.processes import run_in_foreground
from rft_platform.cluster.this_process import terminable
slow = '''
import pathlib, sys, time
from rft_platform.cluster.this_process import terminable
with terminable():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.7)
        pathlib.Path(sys.argv[1]).write_text("bye")
'''
with terminable():
    try:
        run_in_foreground([sys.executable, "-c", slow, sys.argv[1]], dict(os.environ))
    except KeyboardInterrupt:
        sys.exit(7)
"""


@pytest.mark.parametrize("of_terminal", [True, False], ids=["Ctrl-C", "SIGTERM of one process"])
def test_an_interrupt_waits_for_the_command_in_the_foreground(tmp_path: Path, of_terminal: bool) -> None:
    farewell = tmp_path / "farewell"
    command = [sys.executable, "-c", FOREGROUND, str(farewell)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        if of_terminal:
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.terminate()
        assert parent.wait(20) == 7
    assert farewell.read_text() == "bye"
