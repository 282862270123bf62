"""Lease files, by which later commands find a long-lived process.

A server writes its lease when it is ready to serve and removes it when it ends. A lease names the process (pid and
start time) and the folder that the lease was written in. It is valid only if both are right: the lease still lies in
that folder (in a copied home it belongs to the original), and the process was started for this lease (the pid may have
been reused). Any other lease is ignored, and replaced by the next start.

A lease may also name the command that started the process. Then the last command that uses the process ends it.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from rft_platform.common.files import atomic_path, read_json

CREATE_TIME_TOLERANCE_S = 1.0  # creation times derive from the kernel's boot time, which moves when the clock is set
LEASE_VARIABLE = "RFT_LEASE"  # environment variable with the path of the lease that a process was started for
STARTER_VARIABLE = "RFT_STARTED_BY"  # environment variable with the name of the command that started a process


@dataclass
class Lease:
    """Process, address and control token of a server; because of the token the file is readable by its owner only."""

    kind: str  # "engine-transformers", "trainer", ...
    pid: int
    create_time: float  # start of the process, seconds since the epoch, from psutil
    host: str
    port: int
    token: str = field(repr=False)
    model_digest: str
    started_at: float  # seconds since the epoch
    details: dict[str, Any]
    start_ticks: int | None = field(default=None, compare=False)  # start of the process, counted from the boot
    started_by: str | None = field(default=None, compare=False)  # None: no command ends it, only its idle time-out
    file: Path | None = field(default=None, compare=False)  # path where it was written; None: not read from a file


def read_lease(path: Path) -> Lease | None:
    """The lease at ``path``; None if there is none, it is malformed, or it was written in another folder."""
    try:
        document = read_json(path)
        written_in = document.pop("folder", None) if isinstance(document, dict) else None
        lease = _parse(document)
        if written_in is not None and _identity(path.parent) != (written_in["device"], written_in["inode"]):
            return None
        lease.file = path.absolute() if written_in is None else Path(written_in["path"]) / path.name
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
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
        values["start_ticks"] = _start_ticks(lease.pid)
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


def find_process(pid: int, create_time: float) -> psutil.Process | None:
    """The running process with this pid and creation time; None if it ended or the pid was reused."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) <= CREATE_TIME_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def holder(lease: Lease) -> psutil.Process | None:
    """The running process that wrote ``lease``; None if it has ended or the pid belongs to another program.

    For a lease that was read from a file, the process's environment or command line must name that file.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(lease.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        ticks = None if lease.start_ticks is None else _start_ticks(lease.pid)
        if ticks is None:
            same = abs(process.create_time() - lease.create_time) <= CREATE_TIME_TOLERANCE_S
        else:
            same = ticks == lease.start_ticks
        if same and (lease.file is None or names_lease(process, lease.file)):
            return process
    return None


def is_alive(lease: Lease) -> bool:
    """Whether the process that wrote ``lease`` still runs."""
    return holder(lease) is not None


def names_lease(process: psutil.Process, file: Path) -> bool:
    """Whether the environment or command line of ``process`` names the lease ``file``."""
    lease_paths = {str(file), str(file.resolve())}
    with suppress(psutil.AccessDenied):
        started_for = process.environ().get(LEASE_VARIABLE)
        if started_for and (started_for in lease_paths or str(Path(started_for).resolve()) in lease_paths):
            return True
    with suppress(psutil.AccessDenied):
        for argument in process.cmdline():
            if any(path in argument for path in lease_paths):
                return True
            if argument.endswith(file.name) and (Path(process.cwd()) / argument).resolve() == file.resolve():
                return True
    return False


def _parse(document: Any) -> Lease:
    """The lease in a JSON document; raises TypeError or ValueError for invalid values."""
    lease = Lease(**document)
    texts, numbers = (lease.kind, lease.host, lease.token, lease.model_digest), (lease.create_time, lease.started_at)
    integers = (lease.pid, lease.port, *(() if lease.start_ticks is None else (lease.start_ticks,)))
    if not all(isinstance(value, str) for value in texts) or not isinstance(lease.details, Mapping):
        raise TypeError("a lease needs text for kind, host, token and model_digest, and a mapping for details")
    if not isinstance(lease.started_by, str | None):
        raise TypeError("a lease needs text for started_by, or null")
    if not all(type(value) is int for value in integers) or not 0 < lease.pid < 2**31 or not 0 < lease.port < 2**16:
        raise ValueError("a lease needs positive integers for pid and port")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
        raise ValueError("a lease needs finite numbers for its times")
    return lease


def _identity(folder: Path) -> tuple[int, int]:
    """Device and inode, which distinguish a folder from its copy."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


def _start_ticks(pid: int) -> int | None:
    """Ticks between the boot and the start of a process; None if there is no such process or no /proc."""
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    return None
