"""End a server whose supervisor is gone, however that ended: a killed supervisor stops nothing itself.

``python -m rft_platform.common.processes.parent PID`` stops process PID as its supervisor would have done. It is
another process, because it has to outlive the server that starts it.
"""

import os
import subprocess
import sys
import threading
import time

import psutil

from rft_platform.common.processes.spawn import stop_process

#: Environment variable with the process id of the supervisor that started a server.
SUPERVISOR = "RFT_SUPERVISOR"
#: Seconds that a server has to end, and then its descendants in other process groups, before they are killed.
STOP_S, STOP_APART_S = 7.0, 4.0
_POLL_S = 0.5


def end_with_supervisor() -> None:
    """End this process and its descendants when the supervisor ends, if one started it. Call it first in a server."""
    supervisor = os.environ.pop(SUPERVISOR, None)  # processes started here have another parent
    if supervisor is not None:
        threading.Thread(target=_watch, args=(int(supervisor),), name="supervisor", daemon=True).start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_S)
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


if __name__ == "__main__":
    stop_process(psutil.Process(int(sys.argv[1])), STOP_S, STOP_APART_S)
