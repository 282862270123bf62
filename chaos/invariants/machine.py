"""Invariants of processes and files: no orphans, no stale leases, no half-written files."""

from collections.abc import Iterator
from contextlib import suppress

import psutil

from chaos.invariants.context import Finding
from chaos.process_table import processes_of
from rft_platform.common.files import is_temporary
from rft_platform.config.home import Home

_SERVERS = ("engine", "trainer")


def servers_hold_their_leases(home: Home) -> Iterator[Finding]:
    """While the project is open: every engine and trainer has a lease, and every lease has a running process."""
    held = home.cluster.services()
    details = [status.address.details for status in held.values()]
    owners = {each["pid"] for each in details} | {each.get("launcher") for each in details}
    for member in processes_of(home):
        if (
            member.role in _SERVERS
            and member.pid not in owners
            and member.parent not in owners
            and not _of_actor(member.pid)
        ):
            yield Finding(f"{member} runs without a lease: nobody will find it, or end it")
    for name, status in held.items():
        if not status.runs:
            yield Finding(f"{name}.json names pid {status.address.details['pid']}, which does not run any more")


def _of_actor(pid: int) -> bool:
    """Whether a Ray actor started the process; it ends with its actor."""
    with suppress(psutil.Error):
        return any("".join(parent.cmdline()[:1]).startswith("ray::") for parent in psutil.Process(pid).parents())
    return False


def no_process_is_left(home: Home) -> Iterator[Finding]:
    """After the end: no process belongs to the home."""
    for member in processes_of(home):
        yield Finding(f"{member} still runs")


def no_lease_is_left(home: Home) -> Iterator[Finding]:
    """After the end: no lease file is left."""
    for name in home.cluster.services():
        yield Finding(f"{home.leases / name}.json is still there")


def nothing_is_half_written(home: Home) -> Iterator[Finding]:
    """After the end: no temporary file or folder of the platform is left in the home."""
    for path in sorted(home.root.rglob(".*")):
        if is_temporary(path.name):
            yield Finding(f"{path} was left behind by a writer that was killed")
