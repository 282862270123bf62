"""Entry of a sandboxed process: takes limits upon itself, leaves the network where it may, then becomes the program.

Run as a file by ``python -I`` with the limits as JSON in the first argument, the program's file in the second and its
arguments after that. It stands alone: it imports nothing of the platform.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Where namespaces are to be had the program is their first process: with it everything it started ends."""
    limits, program = json.loads(sys.argv[1]), sys.argv[2:]
    if not _leave():
        _become(limits, program)
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _become(limits, program)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _leave() -> bool:
    """Namespaces of our own, without a network: False where the machine does not give them."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK) == 0
    except (OSError, AttributeError):  # not Linux
        return False


def _become(limits: dict[str, int], program: list[str]) -> None:
    for name in ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
        limit = limits[name]
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (most, most))
    os.execv(sys.executable, [sys.executable, "-I", "-B", *program])


if __name__ == "__main__":
    main()
