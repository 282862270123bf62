"""Naming scheme for temporary files, so that leftovers of a killed writer can be recognised and removed."""

import hashlib
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

#: Target's name, machine and process id of the writer, random digits; ``.old`` is a folder that is being replaced.
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.(?P<machine>[0-9a-f]{6})-(?P<pid>\d+)-[0-9a-f]{8}\.(?:tmp|old)")


def temporary_path(path: Path, ending: str = "tmp") -> Path:
    """A unique sibling of ``path``; ``ending`` is ``tmp`` or ``old``."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.{ending}")


def is_temporary(name: str) -> bool:
    """Whether ``name`` is that of a temporary file or folder, in use or left by a killed writer."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of ``path`` whose writers on this machine no longer run."""
    for leftover in path.parent.iterdir():
        found = _TEMPORARY.fullmatch(leftover.name)
        if found and found["target"] == path.name and found["machine"] == _machine() and not _runs(int(found["pid"])):
            with suppress(FileNotFoundError):  # another writer may remove it at the same time
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@cache
def _machine() -> str:
    """Six hex digits that identify this machine or container on a shared file system, as pids are local to it."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _runs(pid: int) -> bool:
    import psutil  # imported here: rollout workers import this module in environments without psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a zombie is a killed child, not yet reaped
    except psutil.NoSuchProcess:
        return False
