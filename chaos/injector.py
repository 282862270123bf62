"""Perform a planned kill: wait for its moment, find the victim, send the signal."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from chaos.process_table import HomeProcess, processes_with_role
from chaos.progress_probe import POLL_S, PointWatch, Progress, current_progress, wait_for
from chaos.schedule import Kill
from rft_platform.config.home import Home

_STOPPED_S = 0.7  # time between SIGSTOP and SIGKILL
_CONTINUED_S = 5.0  # how long a process stays stopped that the platform does not watch
#: Roles that the platform detects as stopped and replaces. A driver, for example, may be stopped on purpose (Ctrl-Z).
REPLACED_WHEN_STOPPED = ("engine", "trainer")
_TERM_S = 15.0  # time for a terminated process to end
_PROCESS_POLL_S = 0.05  # interval for reading the process table


def wait_for_moment(home: Home, checkpoints: Path, kill: Kill, timeout_s: float) -> bool:
    """Wait until the project ENTERS the planned moment, then for the planned delay; False on a time-out."""
    if kill.point == "any":
        time.sleep(kill.delay_s)
        return True
    watch = PointWatch(home, checkpoints, kill.point)
    on_time = wait_for(watch.reached, timeout_s, _PROCESS_POLL_S if kill.point == "starting" else POLL_S)
    if on_time:
        time.sleep(kill.delay_s)
    return on_time


@dataclass(frozen=True, slots=True)
class InjectionResult:
    """The victim of a kill, and the processes that had its role."""

    victim: HomeProcess | str | None  # None: no process with the target's role was found in time
    progress: Progress
    before: frozenset[int] = frozenset()  # process ids with this role before the kill; a successor has another id
    mark: tuple[int, int] | None = None  # the progress at a fault that had to wait for its victim


def inject(
    home: Home,
    kill: Kill,
    timeout_s: float,
    expected: set[int],
    victims: Callable[[], list[HomeProcess]] | None = None,
) -> InjectionResult:
    """Wait for a process of the target's role and kill it. Its process id is first added to ``expected``.

    ``victims`` finds other processes than those with the target's role.
    """
    found: list[HomeProcess] = []

    def found_victims() -> bool:
        found[:] = processes_with_role(home, kill.target) if victims is None else victims()
        return bool(found)

    if not wait_for(found_victims, timeout_s, _PROCESS_POLL_S):
        return InjectionResult(None, current_progress(home))
    victim = found[kill.number % len(found)]
    result = InjectionResult(victim, current_progress(home), frozenset(member.pid for member in found))
    if kill.how == "stop":
        return _stop(victim, result, expected)
    expected.add(victim.pid)
    if kill.how == "term":
        _send(victim, signal.SIGTERM)
        if wait_for(lambda: not victim.alive, _TERM_S, _PROCESS_POLL_S):
            return result
    elif kill.how == "stop+kill":
        _send(victim, signal.SIGSTOP)
        time.sleep(_STOPPED_S)
    _send(victim, signal.SIGKILL)
    wait_for(lambda: not victim.alive, _TERM_S, POLL_S)
    return result


def _stop(victim: HomeProcess, result: InjectionResult, expected: set[int]) -> InjectionResult:
    """Stop the victim: permanently if the platform replaces it, otherwise for some seconds."""
    _send(victim, signal.SIGSTOP)
    if victim.role in REPLACED_WHEN_STOPPED:
        expected.add(victim.pid)
        return result
    time.sleep(_CONTINUED_S)
    _send(victim, signal.SIGCONT)
    return replace(result, before=frozenset())


def _send(victim: HomeProcess, number: signal.Signals) -> None:
    if victim.alive:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, number)
