"""Limits of a process, its descendants, and its end with its parent.

As a program, this module gives up the network and writing outside its folder and runs another program. In the end it
kills all processes that the program left running. ``python -I`` runs it as a file, with the arguments: a pipe on which
it reports that it runs, a pipe that closes when the parent ends, limits as JSON, the program's file, the program's
arguments. The module imports nothing of the platform.
"""

import fcntl
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from contextlib import suppress

_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_PAUSE_S = 0.001

# Landlock (linux/landlock.h): its system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38  # the last: PR_SET_NO_NEW_PRIVS
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))


def end_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process and its group as soon as the other end of the pipe ``lifeline`` closes.

    The kernel closes that end when the parent ends, however it ends. The kill works while C code holds the interpreter.
    """
    group = os.getpgrp()  # 0 if the group's leader is outside this process's namespace
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group or os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        with suppress(BlockingIOError):  # the parent runs; nobody writes to the pipe
            _end_at_eof(lifeline)
    else:  # not Linux
        threading.Thread(target=_end_at_eof, args=(lifeline,), daemon=True).start()


def _end_at_eof(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def set_limit(name: str, limit: int) -> None:
    """Set the kernel's limit ``name`` (without ``RLIMIT_``) of this process, or keep a lower one."""
    kind = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(kind)[1]
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (most, most))


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` started, those that these started and so on, also those in other sessions.

    Empty on a system without /proc. A process whose parent has ended is a child of the process that adopted it.
    """
    from pathlib import Path  # slow to import, and seldom needed

    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            after_name = (process / "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(process.name)] = int(after_name[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def main() -> None:
    """Run the program as a child; end with its exit code once everything that it started has ended.

    If namespaces are available, the child is their first process, and the kernel ends the others with it. Otherwise
    this process adopts orphaned descendants, whatever session they are in, and kills them.
    """
    start, lifeline, limits, program = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]
    os.set_inheritable(lifeline, False)
    end_with_parent(lifeline)
    os.write(start, b"x")
    os.close(start)
    _leave()
    _control(_ADOPT_ORPHANS, 1)
    child = os.fork()
    if child == 0:
        _control(_DIE_WITH_PARENT, signal.SIGKILL)
        _confine_writes()
        for name in ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
            set_limit(name, limits[name])
        os.execv(sys.executable, [sys.executable, "-I", "-B", *program])
    _, status = os.waitpid(child, 0)
    _end_children()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _leave() -> bool:
    """Enter new namespaces without a network; return False if the machine does not allow them."""
    import ctypes

    try:
        return ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK) == 0
    except (OSError, AttributeError):  # not Linux
        return False


def _confine_writes() -> bool:
    """Deny writing, creating, renaming and deleting outside the working directory; return False without Landlock."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return False
    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    if version < 1:
        return False
    denied = _WRITE_FILE | _MAKE_AND_REMOVE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rules = call(_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(denied)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    for path, allowed in ((".", denied), ("/dev/null", denied & (_WRITE_FILE | _TRUNCATE))):
        place = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place))
        call(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(place)
    _control(_NO_NEW_PRIVILEGES, 1)
    confined = call(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return bool(confined)


def _control(option: int, value: int) -> None:
    import ctypes

    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_children() -> None:
    """Kill the children of this process until none is left. The children of a killed child become our children."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
