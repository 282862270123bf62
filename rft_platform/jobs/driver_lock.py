"""Whether somebody drives a project now: the in-process driver holds a lock for as long as it lives."""

import fcntl

from rft_platform.config.home import Home
from rft_platform.errors import UserError
from rft_platform.files import naming

_LOCK = "driver.lock.lock"  # the lock file beside `leases/driver.lock`, see processes.lease.locked


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
        raise UserError(
            f"another `rft run` or `rft demo` is driving {home.root}: wait for it, or interrupt it "
            "(`rft rounds` shows how far it is)"
        )
