"""Invariants of processes and files: no orphans, no stale leases, no half-written files."""

from collections.abc import Iterator

from rft_platform.chaos.census import members
from rft_platform.chaos.scene import Broken
from rft_platform.config.home import Home
from rft_platform.leftovers import is_temporary
from rft_platform.servers.leases import leases_of

_SERVERS = ("engine", "trainer")


def servers_hold_their_leases(home: Home) -> Iterator[Broken]:
    """While the project is open: every engine and trainer has a lease, and every lease has a running process."""
    held = leases_of(home)
    owners = {lease.lease.pid for lease in held} | {lease.lease.details.get("launcher") for lease in held}
    for member in members(home):
        if member.role in _SERVERS and member.pid not in owners and member.parent not in owners:
            yield Broken(f"{member} runs without a lease: nobody will find it, or end it")
    for lease in held:
        if not lease.alive:
            yield Broken(f"{lease.path.name} names pid {lease.lease.pid}, which does not run any more")


def no_process_is_left(home: Home) -> Iterator[Broken]:
    """After the end: no process belongs to the home."""
    for member in members(home):
        yield Broken(f"{member} still runs")


def no_lease_is_left(home: Home) -> Iterator[Broken]:
    """After the end: no lease file is left."""
    for lease in leases_of(home):
        yield Broken(f"{lease.path} is still there")


def nothing_is_half_written(home: Home) -> Iterator[Broken]:
    """After the end: no temporary file or folder of the platform is left in the home."""
    for path in sorted(home.root.rglob(".*")):
        if is_temporary(path.name):
            yield Broken(f"{path} was left behind by a writer that was killed")
