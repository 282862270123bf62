"""Bound the size of log files while other processes write to them.

A long-lived process cannot switch to another log file. All writers append (``O_APPEND``), so the file can be copied
and truncated in place while they write. Lines written between the copy and the truncation are lost.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rft_platform.cluster.local.locks import try_lock
from rft_platform.common.files import atomic_path

DEFAULT_MAX_BYTES = 8 * 2**20
_CHECK_EVERY_S = 10.0
_WATCH_EVERY_S = 2.0
_LOCK = ".bounding.lock"
_checked: dict[Path, float] = {}


def max_log_bytes() -> int:
    """Size above which a log is rotated: ``RFT_LOG_MAX_BYTES``, by default 8 MiB."""
    given = os.environ.get("RFT_LOG_MAX_BYTES", "")
    return int(given) if given.isdigit() and int(given) > 0 else DEFAULT_MAX_BYTES


def bound_logs(folder: Path, max_bytes: int | None = None) -> list[Path]:
    """Copy the end of every ``*.log`` larger than ``max_bytes`` to ``*.log.1`` and truncate it.

    The copy has at most ``max_bytes`` and replaces the previous one. Returns the truncated files. Does nothing while
    another process rotates the logs of this folder.
    """
    limit = max_log_bytes() if max_bytes is None else max_bytes
    large = [file for file in folder.glob("*.log") if file.stat().st_size > limit]
    if not large:
        return []
    with (folder / _LOCK).open("w") as lock:
        if not try_lock(lock):
            return []
        for file in large:
            with atomic_path(file.with_name(file.name + ".1")) as copy, file.open("rb") as source:
                source.seek(-min(limit, file.stat().st_size), os.SEEK_END)
                with copy.open("xb") as target:
                    shutil.copyfileobj(source, target)
                shutil.copymode(file, copy)  # logs are readable by their owner only
            os.truncate(file, 0)
    return large


def bound_logs_now_and_then(folder: Path) -> None:
    """Call ``bound_logs``, but at most every ten seconds: for callers in loops and at the start of stages."""
    now = time.monotonic()
    if now - _checked.get(folder, -_CHECK_EVERY_S) >= _CHECK_EVERY_S:
        _checked[folder] = now
        bound_logs(folder)


@contextmanager
def logs_bounded(folder: Path, every_s: float = _WATCH_EVERY_S) -> Iterator[None]:
    """Call ``bound_logs`` every ``every_s`` seconds in a thread during the block, because a stage can print a lot."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            with suppress(OSError):  # for example a full disk, which the stages themselves report
                bound_logs(folder)

    thread = threading.Thread(target=watch, name="log-bounds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CHECK_EVERY_S)
