"""The child process of ``bounded_call``: calls one function for every request on its standard input, a socket.

The process ends when its parent closes the socket. The kernel kills the process earlier if a call uses more processor
time than the request allows: the timer's signal has no handler, so no computation can delay the kill.
"""

import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Serve a function. Command line arguments: megabytes of memory, ``module:name``, and further modules to import."""
    megabytes, target, *imports = sys.argv[1:]
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    for needed in imports:
        importlib.import_module(needed)
    _set_limit(resource.RLIMIT_AS, int(megabytes) << 20)
    _set_limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as stream:
        stream.write(b"{}\n")
        stream.flush()
        for line in stream:
            cpu_s, arguments = json.loads(line)
            stream.write(json.dumps(_answer(function, arguments, cpu_s)).encode() + b"\n")
            stream.flush()


def _answer(function: Callable[..., Any], arguments: list[Any], cpu_s: float) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return {"value": function(*arguments)}
    except MemoryError:
        return {"exceeded": "more memory than the worker may use"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _set_limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (most, hard))


if __name__ == "__main__":
    main()
