"""End a server whose supervisor is gone, however that ended: a killed supervisor stops nothing itself.

``python -m rft_platform.common.processes.parent run COMMAND ...`` runs a command of another package as a server, which
then ends with its supervisor too. ``... stop PID`` stops process PID as its supervisor would have done. It is another
process, because it has to outlive the server that starts it.
"""

import os
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points

import psutil

from rft_platform.common.processes.spawn import stop_process

#: Environment variable with the process id of the supervisor that started a server.
SUPERVISOR = "RFT_SUPERVISOR"
#: Seconds that a server has to end, and then its descendants in other process groups, before they are killed.
STOP_S, STOP_APART_S = 7.0, 4.0
_POLL_S = 0.5
_THIS = "rft_platform.common.processes.parent"  # ``__name__`` is another one if this module is run


def end_with_supervisor() -> None:
    """End this process and its descendants when the supervisor ends, if one started it. Call it first in a server."""
    supervisor = os.environ.pop(SUPERVISOR, None)  # processes started here have another parent
    if supervisor is not None:
        threading.Thread(target=_watch, args=(int(supervisor),), name="supervisor", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_S)
    command = [sys.executable, "-P", "-m", _THIS, "stop", str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def as_server(command: str, *arguments: str) -> list[str]:
    """What follows ``python -m`` to run a command of another package as a server that ends with its supervisor."""
    return [_THIS, "run", command, *arguments]


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    if command == "stop":
        stop_process(psutil.Process(int(arguments[0])), STOP_S, STOP_APART_S)
    else:
        end_with_supervisor()
        sys.argv = arguments
        (script,) = entry_points(group="console_scripts", name=arguments[0])
        sys.exit(script.load()())
