"""Retire rollouts of old rounds: delete them or move them to an archive. Their entries stay in the ledger."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.errors import StorageError
from rft_platform.experience.ledger import RetiredFile
from rft_platform.experience.rounds import round_key
from rft_platform.files import atomic_path, digest_file

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore


@dataclass(frozen=True, slots=True)
class Retirement:
    """The rollouts of one round that were retired, or would be in a dry run."""

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
    or if the archive holds a different file of the same name.
    """
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
            archived = None if target is None else str(target / name)
            contents.retired[name] = RetiredFile(contents.files.pop(name), time.time(), archived)
    return found


def _copy(source: Path, target: Path, sha256: str) -> None:
    if target.exists():
        if digest_file(target) == sha256:
            return
        raise StorageError(
            f"{target}: holds other bytes than {source}, as of another project, so neither was touched: give each "
            "project an archive folder of its own"
        )
    with atomic_path(target) as temp:
        shutil.copyfile(source, temp)
        if digest_file(temp) != sha256:
            raise StorageError(f"{source}: holds other bytes than were written, so it was not archived or retired")
