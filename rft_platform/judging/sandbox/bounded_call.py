"""Call a function in a child process that is killed when it uses too much processor time or memory.

Rules whose cost depends on model-written text run in such a process. Processes are reused, also by later judgings of
this process and from other event loops; they end when this process ends.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

from rft_platform.cluster.child import CallError, Child, ChildError, LimitExceededError, repeatable_environment

MEMORY_MB = 2048  #: address space of each process, in addition to that of its modules
_LEAST_WAIT_S = 60.0  # minimum wait for the start of a process and its answer, however loaded the machine is
_WAIT_FACTOR = 10.0  # seconds of wall time for each second of processor time
_ATTEMPTS = 2  # the first process may have been killed by something else

#: Idle processes by module and imports. ``append`` and ``pop`` of a list are atomic: no lock is held during a fork.
_idle: dict[tuple[str, ...], list[Child]] = {}


async def call_bounded(
    function: Callable[..., Any], *arguments: Any, cpu_s: float, imports: tuple[str, ...] = ()
) -> Any:
    """Return ``function(*arguments)``, computed in a child process; arguments and result are JSON values.

    ``function`` must be at the top level of a module. ``imports`` names the large modules that it imports: a process
    loads them before the time of a call starts. Raises LimitExceededError after ``cpu_s`` seconds of processor time, at
    MEMORY_MB, or if the process dies twice; RuntimeError for an exception of the function, OSError if no process
    starts, and ValueError if the function is not at the top level of a module.
    """
    module, name = _place(function)
    for _ in range(_ATTEMPTS):
        child = _take(module, imports)
        try:
            return await child.ask_async(name, *arguments, cpu_s=cpu_s, wall_s=max(_LEAST_WAIT_S, _WAIT_FACTOR * cpu_s))
        except CallError as error:
            raise RuntimeError(str(error)) from None
        except LimitExceededError:
            raise
        except ChildError as error:
            if not error.started:
                raise OSError(f"the process of a judge does not start: {error}") from error
            died = error.how
        finally:
            _idle.setdefault((module, *imports), []).append(child)  # a killed one is dropped when it is taken
    how = f"died {_ATTEMPTS} times: it {died}"
    raise LimitExceededError(f"the process of {name} {how}", how)


@cache
def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a function at the top level of a module; ValueError for another."""
    module, name = function.__module__, function.__qualname__
    if "<" in name or attrgetter(name)(importlib.import_module(module)) is not function:
        raise ValueError(f"{function!r} cannot be called in another process: define it at the top level of a module")
    return module, name


def _take(module: str, imports: tuple[str, ...]) -> Child:
    """An idle process, or a new one."""
    idle = _idle.get((module, *imports), [])
    with suppress(IndexError):  # none is left
        while True:
            if (child := idle.pop()).is_alive:
                return child
    return Child(module, imports=imports, memory_mb=MEMORY_MB, env=repeatable_environment())
