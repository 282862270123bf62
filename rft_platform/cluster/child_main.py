"""The process of a ``Child``: calls functions of one module for its parent, within limits of time and memory.

Any interpreter may run this file with two arguments: the number of a socket, and a JSON object of ``module``,
``imports`` and ``memory_mb``. Each request on the socket is a line ``[function, cpu_s, arguments]``. The answer is a
line with the ``value``, the ``error`` or ``memory`` (the limit was reached), possibly after lines with a ``note``.
Standard input is a pipe that closes when the parent ends; standard output and error are the log.
"""

import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

ERROR_CHARACTERS = 4000  # of an exception's text


class _Channel:
    """The socket to the parent."""

    def __init__(self, number: int) -> None:
        os.set_inheritable(number, False)
        self._socket = socket.socket(fileno=number)
        self.requests = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        """Send a message; thread-safe. ``value`` may be bytes, which stand for JSON text."""
        line = b'{"%s": %s}\n' % (kind.encode(), value if isinstance(value, bytes) else json.dumps(value).encode())
        with self._lock:
            self._socket.sendall(line)

    def close(self) -> None:
        """Close this process's copy of the socket: children that user code forks must not write to the parent."""
        os.close(self._socket.detach())


_channel: _Channel


def note(value: Any) -> None:
    """Send a value to the parent before the answer of the current call."""
    _channel.send("note", value)


def main(number: int, module_name: str, imports: list[str], memory_mb: int | None) -> None:
    """Answer requests until the parent closes the connection."""
    from rft_platform.cluster.confined import end_with_parent, set_limit

    global _channel
    end_with_parent(os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _channel = _Channel(number)
    os.register_at_fork(after_in_child=_channel.close)
    module = importlib.import_module(module_name)
    for name in imports:
        importlib.import_module(name)
    if memory_mb is not None:
        set_limit("CORE", 0)
        set_limit("AS", _address_space() + (memory_mb << 20))
    _channel.send("ready", True)
    for line in _channel.requests:
        _answer(module, *json.loads(line))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that user code left running


def _answer(module: Any, function: str, cpu_s: float | None, arguments: list[Any]) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s or 0)  # SIGPROF has no handler: no computation can delay the kill
    try:
        for name in function.split("."):
            module = getattr(module, name)
        value = module(*arguments)
        answer: tuple[str, Any] = "value", value if isinstance(value, bytes) else json.dumps(value).encode()
    except MemoryError:
        answer = "memory", True
    except BaseException as error:
        answer = "error", [type(error).__name__, str(error)[:ERROR_CHARACTERS]]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    _channel.send(*answer)


def _address_space() -> int:
    """Bytes of address space that this process uses; 0 where the system does not say it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import rft_platform.cluster.child_main as imported  # functions find ``note`` in this module

    del sys.path[0]  # it may contain libraries of another environment; the package is found without it now
    options = json.loads(sys.argv[2])
    imported.main(int(sys.argv[1]), options["module"], options["imports"], options["memory_mb"])
