"""Whether every file of a project's store still is what was written."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.errors import StorageError
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.ledger import RetiredFile
from rft_platform.experience.store import ExperienceStore
from rft_platform.files import digest_file
from rft_platform.rounds.project import Project


@dataclass(slots=True)
class Verification:
    """What a check of the store found."""

    rounds: int = 0
    files: int = 0
    bytes: int = 0
    damaged: list[DamagedFile] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "damaged": [{"path": str(file.path), "why": file.why} for file in self.damaged]}


def verify(project: Project, *, digest: bool = True) -> Verification:
    """Check every file that a ledger names, here and in archives, and that every note can be read.

    Without ``digest`` sizes and footers are compared, not every byte.
    """
    store, found = project.store, Verification()
    for number in store.rounds():
        damaged = store.damaged(number, digest=digest)
        found.rounds += 1
        found.damaged += [*damaged, *_unreadable_notes(store, number)]
        if any(file.path == store.ledger(number).path for file in damaged):
            continue
        contents = store.ledger(number).read()
        found.files += len(contents.files)
        found.bytes += sum(entry.bytes for entry in contents.files.values())
        found.damaged += [fault for retired in contents.retired.values() if (fault := _archive_fault(retired, digest))]
    return found


def _unreadable_notes(store: ExperienceStore, number: int) -> list[DamagedFile]:
    found = []
    for name in store.notes(number):
        try:
            store.read_note(number, name)
        except StorageError as error:
            path = store.round_folder(number) / f"{name}.json"
            found.append(DamagedFile(path, f"cannot be read ({error.__cause__})"))
    return found


def _archive_fault(retired: RetiredFile, digest: bool) -> DamagedFile | None:
    if retired.archived_to is None:
        return None
    path, entry = Path(retired.archived_to), retired.entry
    if not path.is_file():
        return DamagedFile(path, "was archived there, but is missing")
    same = path.stat().st_size == entry.bytes and (not digest or digest_file(path) == entry.sha256)
    return None if same else DamagedFile(path, f"was archived there, but holds other bytes (sha256 was {entry.sha256})")
