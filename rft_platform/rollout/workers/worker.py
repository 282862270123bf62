"""A worker process: ``python -m rft_platform.rollout.workers.worker SOCKET LIFELINE``. Makes one attempt at a time.

The worker exchanges JSON lines with its parent over the socket (``worker_wire``). It may use the interpreter of another
environment, which needs ``openai`` and the workflow's imports in addition to the standard library. Output of user code
is written to the log.

A separate guardian process waits until the lifeline, a pipe from the parent, closes. This happens at the latest when
the parent ends. The guardian then kills the worker's whole process group, so that no worker outlives its parent, even
if its code hangs.
"""

import os
import signal
import sys
from typing import Any


def main(socket_fd: int, lifeline_fd: int) -> None:
    """Serve the parent until it closes the connection."""
    start_guardian(socket_fd, lifeline_fd)
    os.set_inheritable(socket_fd, False)

    from rft_platform.observability.masked_output import mask_output
    from rft_platform.rollout.workers.worker_service import Channel, serve

    mask_output()
    channel = Channel(socket_fd)
    os.register_at_fork(after_in_child=channel.forget)  # forked children of user code must not write to the parent
    serve(channel)


def start_guardian(socket_fd: int, lifeline_fd: int) -> None:
    """Start a grandchild that kills this process group when the lifeline closes.

    The grandchild belongs to the group, so the group id is not reused before the parent has killed the grandchild, too.
    """
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            _guard(socket_fd, lifeline_fd)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(lifeline_fd)


def _guard(socket_fd: int, lifeline_fd: int) -> None:
    try:
        os.close(socket_fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while os.read(lifeline_fd, 1):
            pass
    finally:
        os.killpg(0, signal.SIGKILL)


def end() -> Any:
    """End this process at once, without waiting for threads that user code left running."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    end()
