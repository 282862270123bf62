"""A process-lifetime singleton lock that records its holder."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rft_platform.cluster.local.locks import try_lock
from rft_platform.common.errors import UserError


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
