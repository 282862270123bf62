"""Invariants of processes and files: no orphans, no stale leases, no half-written files."""

from collections.abc import Iterator

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
        if member.role in _SERVERS and member.pid not in owners and member.parent not in owners:
            yield Finding(f"{member} runs without a lease: nobody will find it, or end it")
    for name, status in held.items():
        if not status.runs:
            yield Finding(f"{name}.json names pid {status.address.details['pid']}, which does not run any more")


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
