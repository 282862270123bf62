"""Entry point of a sandboxed process: gives up the network and writing outside its folder, then runs the program.

In the end it kills all processes that the program left running. ``python -I`` runs this module as a file, with the
arguments: a pipe on which it reports that it runs, limits as JSON, the program's file, the program's arguments. The
module imports nothing of the platform.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_PAUSE_S = 0.001

# Landlock (linux/landlock.h): its system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38  # the last: PR_SET_NO_NEW_PRIVS
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))


def main() -> None:
    """Run the program as a child; end with its exit code once everything that it started has ended.

    If namespaces are available, the child is their first process, and the kernel ends the others with it. Otherwise
    this process adopts orphaned descendants, whatever session they are in, and kills them.
    """
    start, limits, program = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    os.write(start, b"x")
    os.close(start)
    _leave()
    _control(_ADOPT_ORPHANS, 1)
    child = os.fork()
    if child == 0:
        _control(_DIE_WITH_PARENT, signal.SIGKILL)
        _become(limits, program)
    _, status = os.waitpid(child, 0)
    _end_children()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _leave() -> bool:
    """Enter new namespaces without a network; return False if the machine does not allow them."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK) == 0
    except (OSError, AttributeError):  # not Linux
        return False


def _confine_writes() -> bool:
    """Deny writing, creating, renaming and deleting outside the working directory; return False without Landlock."""
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
        for child in _children():
            os.kill(child, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _children() -> Iterator[int]:
    from pathlib import Path  # slow to import, and seldom needed

    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            after_name = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                yield int(process.name)


def _become(limits: dict[str, int], program: list[str]) -> None:
    _confine_writes()
    for name in ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
        limit = limits[name]
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))
    os.execv(sys.executable, [sys.executable, "-I", "-B", *program])


if __name__ == "__main__":
    main()
