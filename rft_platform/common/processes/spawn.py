"""Start and end long-lived processes that outlive the caller."""

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rft_platform.common.errors import RftError
from rft_platform.common.files import last_lines
from rft_platform.common.processes.lease import (
    CREATE_TIME_TOLERANCE_S,
    Lease,
    holder,
    is_alive,
    read_lease,
)

POLL_S = 0.02


class StartError(RftError):
    """A process ended or was not ready in time; the message holds the last lines of its log."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # None: the process still runs, or another process reaped it


def start_detached(command: list[str], log_file: Path, env: dict[str, str]) -> psutil.Process:
    """Start ``command`` in a new session, with exactly the environment ``env``.

    Its standard output and error are appended to ``log_file``. ``command[0]`` is looked up on the caller's PATH.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawnp(
        command[0],
        command,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log_file), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable()),
        ],
        setsid=True,
    )
    return psutil.Process(pid)


def stop_process(process: psutil.Process, timeout_s: float = 10.0, apart_s: float | None = None) -> None:
    """End a process, its process group and its descendants: SIGTERM, then SIGKILL for those left after ``timeout_s``.

    A stopped process is continued, so that it can handle the SIGTERM. Descendants in other groups (such as an engine
    that a run started) are signalled after the group has ended, so that their users can close connections first; they
    have ``apart_s`` seconds (default: ``timeout_s``). If the process has already ended or its pid was reused, nothing
    is done.
    """
    if not _runs(process):
        return
    group, apart = _family(process)
    _signal_group(process.pid, signal.SIGTERM)
    _signal_group(process.pid, signal.SIGCONT)
    _kill_after(group, timeout_s)
    apart = [member for member in apart if _runs(member)]
    for member in apart:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
            member.resume()
    _kill_after(apart, timeout_s if apart_s is None else apart_s)


def kill_process(process: psutil.Process) -> None:
    """Kill a process, its process group and its descendants at once."""
    if not _runs(process):
        return
    _, apart = _family(process)
    _signal_group(process.pid, signal.SIGKILL)
    for member in apart:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _family(process: psutil.Process) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """A process with its descendants: those in its process group, and those in other groups. Never the caller."""
    family, leader = [process], _group_of(process.pid)
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
    family = [member for member in family if member.pid != os.getpid()]
    group = [member for member in family if _group_of(member.pid) == leader]
    return group, [member for member in family if member not in group]


def stop_holder(lease: Lease, timeout_s: float = 10.0) -> bool:
    """End the process that wrote ``lease``, its launcher and their descendants; False if it has already ended.

    A process that was not started for this lease is left alone, even if the lease names its pid.
    """
    root = lease_root(lease)
    if root is None:
        return False
    with suppress(psutil.NoSuchProcess):
        stop_process(root, timeout_s)
    return True


def lease_root(lease: Lease) -> psutil.Process | None:
    """The root of the processes of ``lease``: the holder's launcher if there is one, else the holder; None if ended."""
    process = holder(lease)
    launcher = lease.details.get("launcher")
    if process is not None and launcher is not None:
        with suppress(psutil.NoSuchProcess):
            if process.ppid() == launcher:
                return psutil.Process(launcher)
    return process


def _kill_after(processes: list[psutil.Process], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` for signalled processes to end, then kill the remaining ones."""
    left = wait_until_ended(processes, timeout_s)
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    wait_until_ended(left, timeout_s)


def wait_until_ended(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; returns those that still run after ``timeout_s``.

    A zombie counts as ended. This function reaps children of this process. Other zombies are reaped by the process that
    adopted them; the first process of a container may take seconds for it.
    """
    waited_for = list(processes)
    deadline = time.monotonic() + timeout_s
    left = waited_for
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    psutil.wait_procs([process for process in waited_for if process not in left], timeout=0)
    return left


def wait_for_lease(path: Path, process: psutil.Process, timeout_s: float, log_file: Path) -> Lease:
    """Wait until ``process`` or a child of it has written its lease at ``path``.

    Raises ``StartError`` with the log's last lines as soon as the process ends, or after ``timeout_s``.
    """
    born = process.create_time() if process.is_running() else time.time()
    deadline = time.monotonic() + timeout_s
    while True:
        lease = read_lease(path)
        if lease is not None and lease.create_time >= born - CREATE_TIME_TOLERANCE_S and is_alive(lease):
            return lease
        if not _runs(process):
            code = _exit_code(process)
            raise StartError(f"{_name(log_file)} ended (exit code {code}) before it was ready.{_tail(log_file)}", code)
        if time.monotonic() > deadline:
            raise StartError(f"{_name(log_file)} was not ready after {timeout_s:.0f} s.{_tail(log_file)}")
        time.sleep(POLL_S)


def free_port() -> int:
    """A currently free TCP port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group == os.getpgrp():  # the process is in the caller's group, which must not be ended
            os.kill(pid, number)
        else:
            os.killpg(group, number)


def _inheritable() -> list[int]:
    """Open file descriptors that a started process would inherit, such as the pipe of a code server's helper."""
    found = []
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the descriptor used for the listing is already closed
            if (number := int(file.name)) > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def _group_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _exit_code(process: psutil.Process) -> int | None:
    """Exit code of an ended child; None if it was already reaped."""
    try:
        code = process.wait(timeout=1.0)
    except psutil.NoSuchProcess:
        return None
    return None if code is None else int(code)


def _name(log_file: Path) -> str:
    return f"Process '{log_file.stem}'"


def _tail(log_file: Path) -> str:
    if not log_file.exists():
        return f" It wrote no log at {log_file}."
    return f" Last lines of {log_file}:\n{last_lines(log_file)}"
