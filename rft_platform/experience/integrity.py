"""Detect damaged files of a round and move them to ``aside/``, so that the launch that made them is repeated."""

import time
from dataclasses import dataclass
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import StorageError
from rft_platform.common.files import digest_file, write_json
from rft_platform.experience.file_ledger import LEDGER, Contents, FileEntry, Ledger
from rft_platform.experience.notes import move_aside
from rft_platform.experience.parquet import fetch_unless_here, footer


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of a round that differs from its ledger entry."""

    path: Path
    why: str  # for example "is 10 bytes long, 812 were written"


def damaged(folder: Path, *, digest: bool) -> list[DamagedFile]:
    """The damaged files of a round: missing, of a different size, with an unreadable footer or a wrong row count.

    With ``digest`` every byte is read and compared with the recorded digest, otherwise only a few kB per file.
    """
    try:
        files = Ledger(folder).read().files
    except StorageError as error:
        return [DamagedFile(folder / LEDGER, str(error))]
    if not any(_fault(folder / name, entry, digest) for name, entry in files.items()):
        return []
    with Ledger(folder).change() as contents:  # a writer may have been active: check again under the lock
        found = [(folder / name, _fault(folder / name, entry, digest)) for name, entry in contents.files.items()]
    return sorted((DamagedFile(path, why) for path, why in found if why is not None), key=lambda file: file.path)


def set_rows_aside(ledger: Ledger, contents: Contents, path: Path, why: str) -> Path:
    """Remove a file from the ledger, and move it to the ``aside/`` folder with ``why`` beside it; returns its path."""
    folder, name = ledger.folder, str(path.relative_to(ledger.folder))
    entry = contents.files.pop(name, None)
    ledger.save(contents)
    target = move_aside(path, folder)
    _write_reason(target, name, why, entry)
    return target


def _fault(path: Path, entry: FileEntry, digest: bool) -> str | None:
    if not fetch_unless_here(path):
        return "is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"is {size} bytes long, {entry.bytes} were written"
    try:
        rows = footer(path).num_rows
    except StorageError as error:
        return f"has no readable footer ({error.__cause__})"
    if rows != entry.rows:
        return f"holds {rows} rows, {entry.rows} were written"
    if digest and digest_file(path) != entry.sha256:
        return f"was changed after it was written (sha256 {entry.sha256})"
    return None


def set_document_aside(folder: Path, path: Path, why: str) -> Path:
    """Move a note or the ledger aside. A round without a ledger gets a new one from the files in its folder."""
    with locked(folder / LEDGER):
        target = move_aside(path, folder)
        _write_reason(target, path.name, why, None)
    return target


def _write_reason(target: Path, name: str, why: str, entry: FileEntry | None) -> None:
    reason = {"file": name, "why": why, "at": time.time(), "sha256_written": None if entry is None else entry.sha256}
    write_json(target.with_name(target.name + ".why.json"), reason)
