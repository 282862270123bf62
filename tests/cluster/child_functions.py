"""Functions that the tests call in a ``Child``."""

import builtins as builtins
import os as os
import signal
import subprocess
import sys
from pathlib import Path as Path
from typing import Any

from rft_platform.cluster.child_main import note


def set_up(settings: Any) -> None:
    """What a pool of workers calls first."""


def pid() -> int:
    return os.getpid()


def echo(value: Any) -> Any:
    return value


def count(to: int) -> str:
    for number in range(to):
        note(number)
    return "done"


def shout(text: str) -> str:
    """Write to standard output and error, also below Python's streams, and read standard input."""
    print(text)
    os.write(1, f"{text}\n".encode())
    os.write(2, b'{"value": 1}\n')
    return sys.stdin.read()


def forked() -> int:
    """A forked child that returns as if it were the process itself."""
    if (child := os.fork()) == 0:
        return -1
    os.waitpid(child, 0)
    return os.getpid()


def start_children(pids: str) -> None:
    """Start a process in this group and one with its own session, then compute in C."""
    for session in (False, True):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
        with Path(pids).open("a") as stream:
            stream.write(f"{child.pid}\n")
    pow(7, 7**11)


def complain_and_exit(code: int) -> None:
    print("no space left on the disk", flush=True)
    os._exit(code)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def limits() -> dict[str, Any]:
    import resource

    return {"core": resource.getrlimit(resource.RLIMIT_CORE)[0], "environment": sorted(os.environ)}


def interpreter() -> list[str]:
    import rft_platform

    return [sys.prefix, rft_platform.__file__, sys.path[0]]
