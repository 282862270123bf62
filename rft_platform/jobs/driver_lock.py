"""Locks of the in-process drivers, held while their processes live; a held lock shows that a driver is running.

A project has one driver, or two at the same time, one for each half: one of mode explore and one of mode train. A lock
records its holder.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from rft_platform.cluster.local.locks import is_locked, locked, try_lock
from rft_platform.common.errors import TransientError, UserError
from rft_platform.config.home import Home


@contextmanager
def singleton_lock(path: Path, what: str, **details: object) -> Iterator[None]:
    """Hold the lock at ``path`` during the block; other processes that try to take the lock show ``details``.

    Raises UserError with the holder's details if another process holds the lock. The kernel releases the lock when its
    holder ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as stream:
        if not try_lock(stream):
            raise _is_held(stream, what)
        stream.truncate(0)
        json.dump({"process": os.getpid(), **details}, stream)
        stream.flush()
        yield


def refuse_if_held(path: Path, what: str) -> None:
    """Raise UserError with the holder's details if a process holds the lock at ``path``; writes nothing."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as stream:
        if not try_lock(stream, shared=True):
            raise _is_held(stream, what)


def _is_held(stream: IO[str], what: str) -> UserError:
    stream.seek(0)
    return UserError(f"{what} is already running ({_holder(stream.read())}): stop it first, or use it")


def _holder(text: str) -> str:
    try:
        return ", ".join(f"{name} {value}" for name, value in json.loads(text).items())
    except (ValueError, AttributeError):
        return "it is just starting"


#: The lock of each half; every other mode holds both.
_HALVES = {"train": "driver.lock", "explore": "explorer.lock"}
_INTERFACE = "ui.lock"
_WAIT_S = 5.0  # long enough for another driver that is about to end; a driver that works may take hours


@contextmanager
def driver_lock(home: Home, mode: str = "both") -> Iterator[None]:
    """Hold the driver's lock for ``mode`` during the block, so that no second driver starts.

    Raises UserError if another driver holds it.
    """
    with ExitStack() as stack:
        for lock in _locks(mode):
            try:
                stack.enter_context(locked(home.leases / lock, _WAIT_S))
            except TransientError:
                raise _second_driver(home) from None
        yield


@contextmanager
def config_lock(home: Home) -> Iterator[None]:
    """Hold the lock under which a command writes the project's configuration, and a new driver compares it."""
    with locked(home.leases / "config"):
        yield


def driver_is_running(home: Home) -> bool:
    """Whether an `rft run` or `rft demo` is driving this project, or half of it."""
    return any(is_locked(home.leases / lock) for lock in _HALVES.values())


def other_half_runs(home: Home, mode: str) -> bool:
    """Whether ``mode`` is one half, and a driver of the other half is running."""
    return mode in _HALVES and any(is_locked(home.leases / _HALVES[other]) for other in _HALVES if other != mode)


def is_half(mode: str) -> bool:
    """Whether a driver of ``mode`` does one half of the project and leaves the other half to another driver."""
    return mode in _HALVES


def refuse_second_driver(home: Home, mode: str = "both") -> None:
    """Raise UserError if another driver is running, except a driver of the other half of ``mode``."""
    if any(is_locked(home.leases / lock) for lock in _locks(mode)):
        raise _second_driver(home)


def refuse_if_used(home: Home) -> None:
    """Raise UserError if a driver, `rft ui` or `rft serve` is running on a home that is about to be renamed."""
    refuse_second_driver(home)
    refuse_if_served(home, "both")


@contextmanager
def servers_lock(home: Home, mode: str, **details: object) -> Iterator[None]:
    """Hold the locks of the servers that a command of ``mode`` starts, so that no other command starts them too.

    Mode serve starts the online service, mode train the interface and the training, every other mode both. Raises
    UserError if another command holds one of them.
    """
    with ExitStack() as stack:
        for lock, name in _server_locks(mode).items():
            stack.enter_context(singleton_lock(home.leases / lock, f"{name} of {home.root}", **details))
        yield


def refuse_if_served(home: Home, mode: str) -> None:
    """Raise UserError if another command has started servers that a command of ``mode`` would start."""
    for lock, name in _server_locks(mode).items():
        refuse_if_held(home.leases / lock, f"{name} of {home.root}")


def interface_port(home: Home) -> int | None:
    """The port of the Dagster interface that `rft ui` or `rft serve` runs for this project; None if neither runs."""
    with suppress(FileNotFoundError), (home.leases / _INTERFACE).open(encoding="utf-8") as stream:
        if not try_lock(stream, shared=True):
            with suppress(ValueError, KeyError, AttributeError):  # its holder is just starting
                return int(json.loads(stream.read())["Dagster"].removeprefix("port "))
    return None


def _server_locks(mode: str) -> dict[str, str]:
    interface, service = {_INTERFACE: "`rft ui` or `rft serve`"}, {"service.lock": "the service (`rft serve`)"}
    return service if mode == "serve" else interface if mode == "train" else interface | service


def _locks(mode: str) -> list[str]:
    return [_HALVES[mode]] if mode in _HALVES else list(_HALVES.values())


def _second_driver(home: Home) -> UserError:
    return UserError(
        f"another `rft run` or `rft demo` is driving {home.root}: wait for it, or interrupt it "
        "(`rft rounds` shows its progress)"
    )
