"""Whether somebody drives a project now: the in-process driver holds a lock for as long as it lives."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rft_platform.config.home import Home
from rft_platform.errors import TransientError, UserError
from rft_platform.files import naming
from rft_platform.processes.lease import locked

_LOCK = "driver.lock.lock"  # the lock file beside `leases/driver.lock`, see processes.lease.locked
_WAIT_S = 5.0  # another driver may be about to end; one that drives does so for hours


@contextmanager
def driver_lock(home: Home) -> Iterator[None]:
    """Be the project's only driver for the block; raises UserError where there is another."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(home.leases / "driver.lock", _WAIT_S))
        except TransientError:
            raise _second_driver(home) from None
        yield


def driver_is_running(home: Home) -> bool:
    """Whether an `rft run` or `rft demo` is at work on this project."""
    file = home.leases / _LOCK
    if not file.exists():
        return False
    with file.open("r") as stream, naming(file):
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_second_driver(home: Home) -> None:
    """Raise UserError where another driver is at work: two would wait for each other without a word."""
    if driver_is_running(home):
        raise _second_driver(home)


def _second_driver(home: Home) -> UserError:
    return UserError(
        f"another `rft run` or `rft demo` is driving {home.root}: wait for it, or interrupt it "
        "(`rft rounds` shows how far it is)"
    )
