"""Lease files, by which later commands find a service; which processes belong to a lease, and which use it.

A server writes its lease when it is ready to serve, and removes it when it ends; for a program of another package its
starter does. A lease names the process (pid and start time) and the folder that the lease was written in. It is valid
only if both are right: the lease still lies in that folder (in a copied home it belongs to the original), and the
process was started for this lease (the pid may have been reused). Any other lease is ignored, and replaced by the next
start.

A lease may also name the command that started the process. Then the last command that uses the process ends it. A user
of the service of ``<name>.json`` holds a shared lock on ``<name>.json.users`` until it releases the lock or ends in any
way.

Every process that is started for a lease has the lease's path in its environment, and so have its descendants (ranks of
a launcher, an engine's workers). So those that do not hold the lease, because their starter or parent was killed, are
found even if no lease file names them. Processes that a command started in ``naming_starter`` also have the name of
that command.
"""

import atexit
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import psutil

from rft_platform.cluster.interface import Address
from rft_platform.cluster.local.locks import try_lock
from rft_platform.cluster.local.processes import CREATE_TIME_TOLERANCE_S, find_process, start_ticks, stop_process
from rft_platform.common.errors import TransientError
from rft_platform.common.files import atomic_path, read_json

LEASE_VARIABLE = "RFT_LEASE"  # environment variable with the path of the lease that a process was started for
STARTER_VARIABLE = "RFT_STARTED_BY"  # environment variable with the name of the command that started a process
_used: dict[Path, IO[str]] = {}  # the locks of this process on what it uses, by lease


@dataclass
class Lease:
    """Process, address and control token of a server; because of the token the file is readable by its owner only."""

    kind: str  # "engine-transformers", "trainer", ...
    pid: int
    create_time: float  # start of the process, seconds since the epoch, from psutil
    host: str
    port: int
    token: str = field(repr=False)
    digest: str  # of the service's declaration
    started_at: float  # seconds since the epoch
    details: dict[str, Any]
    generation: int = field(default=1, compare=False)  # how often a service of this name was started
    start_ticks: int | None = field(default=None, compare=False)  # start of the process, counted from the boot
    started_by: str | None = field(default=None, compare=False)  # None: no command ends it, only its idle time-out
    file: Path | None = field(default=None, compare=False)  # path where it was written; None: not read from a file

    @property
    def alive(self) -> bool:
        """Whether the process that wrote the lease still runs."""
        return holder(self) is not None

    @property
    def identity(self) -> tuple[int, float]:
        """Process id and creation time, which together identify one process for ever."""
        return self.pid, self.create_time

    def address(self, name: str) -> Address:
        """Where the service is reached."""
        details = {**self.details, "kind": self.kind, "pid": self.pid, "started_at": self.started_at}
        url = f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"
        return Address(name, url, self.token, self.generation, self.digest, details)


def read_lease(path: Path) -> Lease | None:
    """The lease at ``path``; None if there is none, it is malformed, or it was written in another folder."""
    try:
        document = read_json(path)
        written_in = document.pop("folder")
        lease = _parse(document)
        if _identity(path.parent) != (written_in["device"], written_in["inode"]):
            return None
        lease.file = Path(written_in["path"]) / path.name
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return lease


def write_lease(path: Path, lease: Lease) -> None:
    """Write ``lease`` atomically; the file is readable by its owner only from the first byte on.

    Adds the folder's path, device and inode, and the start ticks of the process. ``started_by`` defaults to the
    starter of the calling process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    device, inode = _identity(path.parent)
    folder = {"path": str(path.parent.absolute()), "device": device, "inode": inode}
    values = {item.name: getattr(lease, item.name) for item in fields(lease) if item.name != "file"}
    if lease.start_ticks is None and find_process(lease.pid, lease.create_time) is not None:
        values["start_ticks"] = start_ticks(lease.pid)
    values["started_by"] = lease.started_by or os.environ.get(STARTER_VARIABLE)
    with atomic_path(path) as temp:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump({**values, "folder": folder}, stream)


def remove_lease(path: Path, pid: int) -> None:
    """Remove the lease if process ``pid`` owns it; a successor's lease stays."""
    lease = read_lease(path)
    if lease is not None and lease.pid == pid:
        path.unlink(missing_ok=True)


def holder(lease: Lease) -> psutil.Process | None:
    """The running process that wrote ``lease``; None if it has ended or the pid belongs to another program.

    For a lease that was read from a file, the process's environment must name that file.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(lease.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        ticks = None if lease.start_ticks is None else start_ticks(lease.pid)
        if ticks is None:
            same = abs(process.create_time() - lease.create_time) <= CREATE_TIME_TOLERANCE_S
        else:
            same = ticks == lease.start_ticks
        if same and (lease.file is None or _was_started_for(process, lease.file)):
            return process
    return None


def _was_started_for(process: psutil.Process, file: Path) -> bool:
    """Whether the environment of ``process`` names the lease ``file``."""
    with suppress(psutil.AccessDenied):
        named = process.environ().get(LEASE_VARIABLE)
        return named is not None and (named == str(file) or Path(named).resolve() == file.resolve())
    return False


def root_of(lease: Lease) -> psutil.Process | None:
    """The root of the processes of ``lease``: the holder's launcher if there is one, else the holder; None if ended."""
    process = holder(lease)
    launcher = lease.details.get("launcher")
    if process is not None and launcher is not None:
        with suppress(psutil.NoSuchProcess):
            if process.ppid() == launcher:
                return psutil.Process(launcher)
    return process


def stop_holder(lease: Lease, timeout_s: float = 10.0, others: bool = False) -> bool:
    """End the process that wrote ``lease``, its launcher and their descendants; False if it has already ended.

    A process that was not started for this lease is left alone, even if the lease names its pid. ``others``: end all
    other processes that were started for it, too, at the same time; the caller holds the lease's lock.
    """
    root = root_of(lease)
    if root is None:
        return False
    _stop_all([root, *(started_for(lease.file) if others and lease.file is not None else ())], timeout_s)
    return True


def _stop_all(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """End processes with their descendants, all at the same time. A child of one of them ends with its parent."""
    found = {process.pid: process for process in processes}
    roots = [process for process in found.values() if _parent(process) not in found]

    def stop(process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            stop_process(process, timeout_s)

    with ThreadPoolExecutor(max(1, len(roots))) as pool:
        list(pool.map(stop, roots))


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None


def lease_environment(lease: Path) -> dict[str, str]:
    """Environment variables to set for a process that is started for ``lease``."""
    return {LEASE_VARIABLE: str(lease.absolute())}


@contextmanager
def naming_starter() -> Iterator[str]:
    """Give the processes started in the block, and their leases, a new name of their starter; yields this name."""
    outer, name = os.environ.get(STARTER_VARIABLE), f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[STARTER_VARIABLE] = name
    try:
        yield name
    finally:
        if outer is None:
            del os.environ[STARTER_VARIABLE]
        else:
            os.environ[STARTER_VARIABLE] = outer


def end_strays(lease: Path, timeout_s: float = 10.0, starter: str | None = None) -> list[int]:
    """End every process that was started for ``lease``, or only those that ``starter`` started; returns their ids.

    Call it while holding the lease's lock, before a new start: any process of the lease that still runs is a stray.
    """
    strays = started_for(lease, starter)
    _stop_all(strays, timeout_s)
    return [process.pid for process in strays]


def started_for(lease: Path, starter: str | None = None) -> list[psutil.Process]:
    """Running processes that were started for ``lease``; with ``starter``, only those that it started."""
    return [process for process, found in _started(starter) if found == lease.absolute()]


def leases_started_below(folder: Path) -> set[Path]:
    """The leases in ``folder`` that running processes were started for, whether they hold them or not."""
    return {lease for _, lease in _started() if lease.parent == folder.absolute()}


def _started(starter: str | None = None) -> Iterator[tuple[psutil.Process, Path]]:
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ()
            lease = environment.get(LEASE_VARIABLE)
            if starter is not None and environment.get(STARTER_VARIABLE) != starter:
                continue
            if lease and process.status() != psutil.STATUS_ZOMBIE:
                yield process, Path(lease)


def note_use(lease: Path) -> None:
    """Record that this process uses the service of ``lease`` (running or about to start) until ``release``.

    The callers of ``note_use`` and ``release`` hold the start lock, so no process begins to use a service that is being
    ended.
    """
    lease = lease.absolute()
    if lease in _used:
        return
    lease.parent.mkdir(parents=True, exist_ok=True)
    stream = _users(lease)
    if not try_lock(stream, shared=True):
        stream.close()
        raise TransientError(f"{stream.name} is locked: the process of {lease} is being ended; repeat the command")
    _used[lease] = stream


def used_leases() -> set[Path]:
    """The leases whose services this process uses."""
    return set(_used)


def release(lease: Path) -> bool:
    """End this process's use; returns whether no other process uses the service of ``lease``."""
    lease = lease.absolute()
    own = _used.pop(lease, None)
    if own is not None:
        own.close()
    with _users(lease) as stream:
        return try_lock(stream)


@atexit.register
def _close() -> None:
    for stream in _used.values():
        stream.close()


def _users(lease: Path) -> IO[str]:
    return lease.with_name(lease.name + ".users").open("a", encoding="utf-8")


def _parse(document: Any) -> Lease:
    """The lease in a JSON document; raises TypeError or ValueError for invalid values."""
    lease = Lease(**document)
    texts, numbers = (lease.kind, lease.host, lease.token, lease.digest), (lease.create_time, lease.started_at)
    integers = (lease.pid, lease.port, lease.generation, *(() if lease.start_ticks is None else (lease.start_ticks,)))
    if not all(isinstance(value, str) for value in texts) or not isinstance(lease.details, Mapping):
        raise TypeError("a lease needs text for kind, host, token and digest, and a mapping for details")
    if not isinstance(lease.started_by, str | None):
        raise TypeError("a lease needs text for started_by, or null")
    if not all(type(value) is int for value in integers) or not 0 < lease.pid < 2**31 or not 0 <= lease.port < 2**16:
        raise ValueError("a lease needs a positive integer for pid, and integers for port and generation")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
        raise ValueError("a lease needs finite numbers for its times")
    return lease


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode, which distinguish a folder from its copy."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino
