"""Names of files and folders that are being written, by which those that a killed writer left behind are told."""

import hashlib
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

#: The target's name, then the machine and the process at work on it; ``.old`` is what a new folder is replacing.
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.(?P<machine>[0-9a-f]{6})-(?P<pid>\d+)-[0-9a-f]{8}\.(?:tmp|old)")


def temporary_path(path: Path, ending: str = "tmp") -> Path:
    """A sibling of ``path`` that nobody else uses; ``ending`` is ``tmp`` or ``old``."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.{ending}")


def is_temporary(name: str) -> bool:
    """Whether this is the name of a file or folder that is being written, or was when its writer was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(path: Path) -> None:
    """Remove what writers of ``path`` on this machine left beside it when they were killed."""
    for leftover in path.parent.iterdir():
        found = _TEMPORARY.fullmatch(leftover.name)
        if found and found["target"] == path.name and found["machine"] == _machine() and not _runs(int(found["pid"])):
            with suppress(FileNotFoundError):  # another writer removes it, too
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@cache
def _machine() -> str:
    """Six digits that tell machines (and containers) that share a file system apart: a pid means nothing elsewhere."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _runs(pid: int) -> bool:
    import psutil  # here: a rollout worker imports this module in environments that do not have it

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a killed child that nobody has waited for
    except psutil.NoSuchProcess:
        return False
