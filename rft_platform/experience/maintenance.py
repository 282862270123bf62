"""Maintenance of rollout files: compaction, and retirement of old rounds.

Compaction merges many small files. Retirement deletes a round's rollouts or moves them to an archive; their entries
stay in the ledger.

Rows keep their order and ids. The ledger keeps the digests of the old files, so the round's digest, by which a lineage
identifies its rows, does not change. Replaced files are deleted only after a grace period, so that readers that still
hold their names can finish.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.common.recorded_paths import to_record
from rft_platform.experience.file_ledger import ROLLOUTS, Contents, FileEntry, Ledger, RetiredFile
from rft_platform.experience.file_names import batches_in, merged_file, round_key
from rft_platform.experience.parquet import fetch_unless_here, read_table, read_tables, write_table
from rft_platform.experience.schema import ROLLOUT_SCHEMA, same_rows
from rft_platform.object_store.mirror import removing

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore

#: Seconds that a replaced file is kept for readers that hold its name; no training reads for longer.
GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files that were replaced by a single file or, in a dry run, would be."""

    round: int
    replaced: tuple[str, ...]  # names in the round's folder
    by: str
    rows: int
    bytes_before: int
    bytes_after: int | None  # None: a dry run


def compact_round(store: "ExperienceStore", round: int, *, dry_run: bool = False) -> list[Rewrite]:
    """Merge the rollout files of a round into one; does nothing if there is at most one.

    Raises StorageError if a file does not hold what was written, or if batches are missing in between.
    """
    ledger = store.ledger(round)
    if len(ledger.read().rollouts()) < 2:
        return []
    with ledger.change() as contents:
        names = contents.rollouts()
        return [_rewrite(ledger, round, contents, names, dry_run)] if len(names) > 1 else []


def sweep_round(store: "ExperienceStore", round: int, *, grace_s: float = GRACE_S, dry_run: bool = False) -> int:
    """Delete files that were replaced or retired more than ``grace_s`` seconds ago; returns the bytes freed.

    If a file was stored again under the same name, it is kept.
    """
    ledger = store.ledger(round)
    if not ledger.read().superseded:
        return 0
    with ledger.change() as contents:
        replaced = [name for name, since in contents.superseded.items() if time.time() - since >= grace_s]
        due = [name for name in replaced if name not in contents.files]
        freed = sum(store.stored_size(ledger.folder / name) or 0 for name in due)
        if not dry_run:
            delete_superseded(ledger, contents, due)
    return freed


def delete_superseded(ledger: Ledger, contents: Contents, names: Sequence[str]) -> None:
    """Delete files that were replaced or retired. The caller holds the lock, which saves the ledger at its end."""
    paths = [ledger.folder / name for name in names]
    with removing(*paths):
        for path in paths:
            path.unlink(missing_ok=True)
    for name in names:
        del contents.superseded[name]


def _rewrite(ledger: Ledger, round: int, contents: Contents, names: Sequence[str], dry_run: bool) -> Rewrite:
    """Replace some files by one. The caller holds the lock; the ledger changes in one step."""
    entries = [contents.files[name] for name in names]
    target = f"{ROLLOUTS}/{merged_file(_batches(ledger.folder, names))}"
    rows, before = sum(entry.rows for entry in entries), sum(entry.bytes for entry in entries)
    if dry_run:
        return Rewrite(round, tuple(names), target, rows, before, None)
    table = _verified(ledger.folder, names, entries)
    sources = tuple(source for name, entry in zip(names, entries, strict=True) for source in entry.sources(name))
    with atomic_path(ledger.folder / target) as temp:
        write_table(table, temp)
        if not same_rows(read_table(temp, ROLLOUT_SCHEMA), table):
            raise StorageError(
                f"{ledger.folder / target}: the new file does not have the data that was written; nothing was changed"
            )
        entry = FileEntry.of(temp, sources)
    for name in names:
        del contents.files[name]
        contents.superseded[name] = time.time()
    contents.files[target] = entry
    ledger.save(contents)
    return Rewrite(round, tuple(names), target, rows, before, entry.bytes)


def _batches(folder: Path, names: Sequence[str]) -> range:
    numbers = [number for name in names for number in batches_in(Path(name).name)]
    found = range(numbers[0], numbers[-1] + 1)
    if list(found) != numbers:
        raise StorageError(f"{folder}: holds batches {numbers}, expected them without a gap: explore the round again")
    return found


def _verified(folder: Path, names: Sequence[str], entries: Sequence[FileEntry]) -> pa.Table:
    """The rows of some files, after a check of their digests."""
    for name, entry in zip(names, entries, strict=True):
        if digest_file(_here(folder / name)) != entry.sha256:
            raise StorageError(
                f"{folder / name}: was changed after it was written, so it is not touched: `rft "
                "store check` lists all such files"
            )
    return read_tables([folder / name for name in names], ROLLOUT_SCHEMA)


def _here(path: Path) -> Path:
    """The file, after it was fetched if only the object store has it."""
    if not fetch_unless_here(path):
        raise StorageError(f"{path}: is missing, so its round is not touched: `rft store check` lists all such files")
    return path


@dataclass(frozen=True, slots=True)
class Retirement:
    """The rollouts of one round that were retired or, in a dry run, would be."""

    round: int
    files: tuple[str, ...]
    rows: int
    bytes: int
    archived_to: str | None


def retire_round(
    store: "ExperienceStore", round: int, *, archive: Path | None = None, dry_run: bool = False
) -> Retirement | None:
    """Retire a round's rollouts, after copying them to ``archive`` if given. Returns None if there are none.

    Judgements, notes and the ledger stay, so the round's digest does not change and its rows remain listed in their
    judgements. The next ``sweep_round`` deletes the files. Raises StorageError if a copy differs from what was written,
    or if the archive holds a different file of the same name, and UserError if the archive is part of the store.
    """
    if archive is not None and archive.resolve().is_relative_to(store.root.resolve()):
        raise UserError(_in_the_store(archive))
    ledger = store.ledger(round)
    if not ledger.read().rollouts():
        return None
    target = None if archive is None else archive.absolute() / round_key(round)
    with ledger.change() as contents:
        names = contents.rollouts()
        entries = {name: contents.files[name] for name in names}
        found = Retirement(
            round,
            tuple(names),
            sum(entry.rows for entry in entries.values()),
            sum(entry.bytes for entry in entries.values()),
            None if target is None else str(target),
        )
        if dry_run:
            return found
        for name, entry in entries.items():
            if target is not None:
                _copy(ledger.folder / name, target / name, entry.sha256)
        for name in names:
            contents.superseded[name] = time.time()
            archived = None if target is None else to_record(target / name, store.home)
            contents.retired[name] = RetiredFile(contents.files.pop(name), time.time(), archived)
        for name in contents.unfinished():
            contents.superseded[name] = time.time()
            del contents.files[name]
    return found


def _in_the_store(archive: Path) -> str:
    return f"{archive}: is part of the store whose files are deleted; give --archive a folder outside it"


def _copy(source: Path, target: Path, sha256: str) -> None:
    if target.exists():
        if source.exists() and target.samefile(source):  # through a link or a mount
            raise UserError(_in_the_store(target))
        if digest_file(target) == sha256:
            return
        raise StorageError(
            f"{target}: differs from {source} and may belong to another project, so neither was touched: "
            "give each project a separate archive folder"
        )
    with atomic_path(target) as temp:
        shutil.copyfile(_here(source), temp)
        if digest_file(temp) != sha256:
            raise StorageError(f"{source}: was changed after it was written, so it was not archived or retired")
