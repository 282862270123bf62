"""Lock of the in-process driver, held while its process lives; tells whether a project is being driven now."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rft_platform.common.errors import TransientError, UserError
from rft_platform.common.locks import is_locked, locked
from rft_platform.config.home import Home

_LOCK = "driver.lock"
_WAIT_S = 5.0  # another driver may be about to end; a working one takes hours


@contextmanager
def driver_lock(home: Home) -> Iterator[None]:
    """Hold the lock of the project's only driver during the block. Raises UserError if there is another one."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(home.leases / _LOCK, _WAIT_S))
        except TransientError:
            raise _second_driver(home) from None
        yield


def driver_is_running(home: Home) -> bool:
    """Whether an `rft run` or `rft demo` is driving this project."""
    return is_locked(home.leases / _LOCK)


def refuse_second_driver(home: Home) -> None:
    """Raise UserError if another driver is running, because the two would wait for each other silently."""
    if driver_is_running(home):
        raise _second_driver(home)


def _second_driver(home: Home) -> UserError:
    return UserError(
        f"another `rft run` or `rft demo` is driving {home.root}: wait for it, or interrupt it "
        "(`rft rounds` shows its progress)"
    )
