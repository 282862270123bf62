"""Start, find and end processes of this machine."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_REAP_S = 1.0
_INTERRUPTED_S = 3.0  # Ctrl-C reaches every process of a terminal; SIGTERM only one, which passes it on then
POLL_S = 0.02
CREATE_TIME_TOLERANCE_S = 1.0  # creation times derive from the kernel's boot time, which moves when the clock is set


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


def stop_process(process: psutil.Process, timeout_s: float = 10.0) -> None:
    """End a process, its process group and its descendants: SIGTERM, then SIGKILL for those left after ``timeout_s``.

    The group is ended only if the process leads it: a service that `rft engine` became is in the group of the script
    that called it. A stopped process is continued, so that it can handle the SIGTERM. Descendants in other groups (such
    as an engine that a run started) are signalled after the group has ended, so that their users can close connections
    first; they have half the time. If the process has already ended or its pid was reused, nothing is done.
    """
    if not runs(process):
        return
    group, apart = _family(process)
    for number in (signal.SIGTERM, signal.SIGCONT):
        _signal_group(process.pid, group, number)
    _kill_after(group, timeout_s)
    apart = [member for member in apart if runs(member)]
    for member in apart:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
            member.resume()
    _kill_after(apart, timeout_s / 2)


def _family(process: psutil.Process) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """A process with its descendants: those in its process group, and those in other groups. Never the caller."""
    family, leader = [process], _group_of(process.pid)
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
    family = [member for member in family if member.pid != os.getpid()]
    group = [member for member in family if _group_of(member.pid) == leader]
    return group, [member for member in family if member not in group]


def _kill_after(processes: list[psutil.Process], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` for signalled processes to end, then kill the remaining ones."""
    left = wait_until_ended(processes, timeout_s)
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    wait_until_ended(left, timeout_s)


def wait_until_ended(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until processes have ended; returns those that still run after ``timeout_s``.

    A zombie counts as ended. This function reaps children of this process, which may take a moment: the main thread
    of a process is a zombie before its other threads have ended. Other zombies are reaped by the process that adopted
    them; the first process of a container may take seconds for it.
    """
    waited_for = list(processes)
    deadline = time.monotonic() + timeout_s
    left = waited_for
    while (left := [process for process in left if runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    psutil.wait_procs([each for each in waited_for if each not in left and _is_child(each)], timeout=_REAP_S)
    return left


def _is_child(process: psutil.Process) -> bool:
    try:
        return process.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return False


def _signal_group(pid: int, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal the process group that ``pid`` leads; ``members`` if it leads none, or the group of the caller."""
    if _group_of(pid) == pid != os.getpgrp():
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
        return
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)


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


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def exit_code(process: psutil.Process) -> int | None:
    """Exit code of an ended child; None if it was already reaped."""
    try:
        code = process.wait(timeout=1.0)
    except psutil.NoSuchProcess:
        return None
    return None if code is None else int(code)


def find_process(pid: int, create_time: float) -> psutil.Process | None:
    """The running process with this pid and creation time; None if it ended or the pid was reused."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) <= CREATE_TIME_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def start_ticks(pid: int) -> int | None:
    """Ticks between the boot and the start of a process; None if there is no such process or no /proc."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process or one of its descendants is stopped (SIGSTOP), so that the others would wait for it."""
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        return any(_status(member) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) for member in family)
    return False


def _status(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return ""


def run_in_foreground(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command on this process's terminal and return its exit code.

    An interrupt waits for the end of the command, which may have to end processes or to save its state.
    """
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_INTERRUPTED_S)
        process.terminate()
        process.wait()
        raise
