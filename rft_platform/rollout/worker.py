"""A worker process: ``python -m rft_platform.rollout.worker SOCKET LIFELINE``. Makes one attempt at a time.

It speaks JSON lines over the socket (``worker_wire``) and may run under an interpreter of another environment: besides
the standard library it needs ``openai`` and what the workflow imports. What user code prints goes to the log.

A guardian process of its own waits for the lifeline to break, which only the parent's end can do, and then kills the
worker's whole process group, whatever hangs in it. So no worker outlives its parent.
"""

import os
import signal
import sys
from typing import Any


def main(socket_fd: int, lifeline_fd: int) -> None:
    """Serve the parent until it hangs up."""
    start_guardian(socket_fd, lifeline_fd)
    os.set_inheritable(socket_fd, False)

    from rft_platform.observability.masked_output import mask_output
    from rft_platform.rollout.worker_service import Channel, serve

    mask_output()
    channel = Channel(socket_fd)
    os.register_at_fork(after_in_child=channel.forget)  # what user code forks must not speak to the parent
    serve(channel)


def start_guardian(socket_fd: int, lifeline_fd: int) -> None:
    """Leave a grandchild behind that kills this process group when the lifeline breaks.

    It belongs to the group, so that the group's id stays taken until the parent has killed it too.
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
    """End this process at once, without waiting for threads that user code left."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    end()
