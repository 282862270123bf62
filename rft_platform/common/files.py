"""Durable, atomic file writes, content digests, and the names of temporary files.

All code of the platform writes files through this module. A temporary file's name tells which process wrote it, so that
the leftovers of a killed writer are recognised and removed.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rft_platform.common.errors import DamagedError, DiskFullError
from rft_platform.common.fault_classification import is_disk_full

#: Key of the digest in a sealed JSON document.
SEAL = "$sha256"
_SYNC_INTERVAL_S = 0.05  # of ``synced_while_written``: at 2 GB/s, 100 MB wait for one fsync


@contextmanager
def atomic_path(path: Path, needs: int | None = None, *, sync: bool = True, sweep: bool = True) -> Iterator[Path]:
    """Yield a temporary sibling of ``path``; on success fsync and rename it, on failure remove it.

    The body may write a file, or create and fill a folder. An existing target file is replaced; an existing target
    folder is replaced after the new one is complete. Leftovers of killed writers of the same target are removed. Raises
    DiskFullError if the disk is full; with ``needs`` (bytes) the message states how much space is needed. Without
    ``sync`` nothing is fsynced: the caller does that later, and can repair what a power failure destroys. Without
    ``sweep`` leftovers stay: looking for them reads the whole folder, once for each of its files.
    """
    temp = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if sweep:
            remove_leftovers(path)
        yield temp
        with naming(path):
            _put_in_place(temp, path, sync)
    except Exception as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise DiskFullError(_no_room(path, temp, needs)) from error
    finally:
        if temp.is_dir():
            shutil.rmtree(temp)
        elif temp.exists():
            temp.unlink()


def _put_in_place(temp: Path, path: Path, sync: bool) -> None:
    if sync:
        fsync_tree(temp)
    if temp.is_dir() and path.exists():
        old = temporary_path(path, "old")
        path.rename(old)
        temp.rename(path)
        shutil.rmtree(old)
    else:
        temp.replace(path)
    if sync:
        fsync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set ``path`` on an OSError of the block that names no file: errors of flock, fsync and write name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_path(path) as temp, naming(path):
        temp.write_text(text, encoding="utf-8")


def create_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to a new file, durably. Raises FileExistsError if the file exists.

    Of several processes, also on several hosts of a network file system, one creates the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as stream:
        try:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text(path, _json_text(value))


def read_json(path: Path) -> Any:
    """Read one JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def last_lines(path: Path, count: int = 20) -> str:
    """The last lines of a log for a message, indented by two spaces; empty if the file is empty or missing."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return ""
    return "\n".join(f"  {line}" for line in lines)


def write_sealed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a digest of its content, so that ``read_sealed_json`` detects changes."""
    write_text(path, sealed_json(value))


def sealed_json(value: Mapping[str, Any]) -> str:
    """The text that ``write_sealed_json`` writes."""
    plain = json.loads(json.dumps({name: item for name, item in value.items() if name != SEAL}))
    return _json_text({**plain, SEAL: _digest_text(_json_text(plain))})


def read_sealed_json(path: Path) -> Any:
    """Read a JSON document and drop its digest; DamagedError if the digest is missing or the content does not match."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    if not isinstance(content, dict) or SEAL not in content:
        raise DamagedError(f"{path}: has no digest of its content ({SEAL}): restore it from a copy")
    written = content.pop(SEAL)
    as_written = text.replace(f'  "{SEAL}": "{written}",\n', "", 1)  # faster than formatting the document again
    if _digest_text(as_written) != written and _digest_text(_json_text(content)) != written:
        raise DamagedError(
            f"{path}: was changed after it was written (its content does not match its {SEAL}): restore it from a copy"
        )
    return content


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON-serialisable value in canonical form, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON that is the same for equal values: keys are sorted, and there are no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _no_room(path: Path, temp: Path, needs: int | None) -> str:
    written = sum(file.stat().st_size for file in [temp, *temp.rglob("*")] if file.is_file())
    wanted = f"{needs:,} bytes are needed" if needs else f"more than the {written:,} bytes written so far are needed"
    folder = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(folder).free + written
    return (
        f"{path}: no space left on the disk: {wanted}, {free:,} are free; free disk space; the "
        "previous content is unchanged"
    )


def fsync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(path: Path) -> None:
    """Fsync a file, or a folder and everything below it."""
    if path.is_dir():
        for child in path.rglob("*"):
            fsync(child)
    fsync(path)


@contextmanager
def synced_while_written(folder: Path) -> Iterator[None]:
    """Fsync the files below ``folder`` repeatedly while the block writes them.

    Otherwise gigabytes wait in the page cache for the last fsync, and on ext4 the fsyncs of all other processes wait
    with them. Raises the OSError of an fsync: a later fsync of the same file would not report it again.
    """
    ended, errors = threading.Event(), list[OSError]()

    def sync() -> None:
        while not ended.wait(_SYNC_INTERVAL_S) and not errors:
            try:
                for place, _, names in os.walk(folder):  # which passes over folders that have been removed meanwhile
                    for path in (Path(place), *(Path(place) / name for name in names)):
                        with suppress(FileNotFoundError):  # a marker file that has been removed
                            fsync(path)
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=sync, name="sync-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


#: Target's name, machine and process id of the writer, random digits; ``.old`` marks a folder that is being replaced.
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.(?P<machine>[0-9a-f]{6})-(?P<pid>\d+)-[0-9a-f]{8}\.(?:tmp|old)")


def temporary_path(path: Path, ending: str = "tmp") -> Path:
    """A unique sibling of ``path``; ``ending`` is ``tmp`` or ``old``."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.{ending}")


def is_temporary(name: str) -> bool:
    """Whether ``name`` is the name of a temporary file or folder, in use or left by a killed writer."""
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
    """Six hex digits that identify this machine or container: on a shared file system a pid alone is ambiguous."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _runs(pid: int) -> bool:
    import psutil  # imported here: rollout workers import this module in environments without psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a zombie is a killed child, not yet reaped
    except psutil.NoSuchProcess:
        return False
