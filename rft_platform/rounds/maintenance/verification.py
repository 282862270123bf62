"""Verify that every file of a project is unchanged since it was written: rows, judgements, notes and checkpoints."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.common.digests import MANIFEST, THINNED, checkpoint_damage
from rft_platform.common.errors import NAMED, DamagedError, StorageError
from rft_platform.common.files import digest_file
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX, from_record
from rft_platform.experience.file_ledger import RetiredFile
from rft_platform.experience.file_names import round_key
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.parquet import fetch_unless_here
from rft_platform.experience.selections import selection_file
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.mirror import fetch_missing
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, damaged_notes, published, read
from rft_platform.rounds.project.repair import contradiction


@dataclass(slots=True)
class Verification:
    """Result of a project check."""

    rounds: int = 0
    files: int = 0  # of the rounds, without archives
    checkpoints: int = 0
    bytes: int = 0  # of files and checkpoints
    notes: int = 0
    damaged: list[DamagedFile] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # rounds whose rows are not those that a training read

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "damaged": [{"path": str(file.path), "why": file.why} for file in self.damaged]}


def verify(project: Project, *, digest: bool = True) -> Verification:
    """Check rows, archives, judgements, notes and checkpoints against their digests, and notes against manifests.

    The ledgers are compared with the digests that trainings recorded: rows may have been replaced by intact other ones.

    Without ``digest`` only the sizes and footers of large files are compared, not every byte.
    """
    store, found = project.store, Verification()
    for number in store.rounds():
        damaged = store.damaged(number, digest=digest)
        found.rounds += 1
        found.damaged += damaged
        notes = list(damaged_notes(store, number))
        found.notes += len(notes)
        found.damaged += filter(None, notes)
        found.damaged += _selection_faults(project, number)
        found.changed += _changed_rows(project, number)
        if any(file.path == store.ledger(number).path for file in damaged):
            continue
        contents = store.ledger(number).read()
        found.files += len(contents.files)
        found.bytes += sum(entry.bytes for entry in contents.files.values())
        retired = contents.retired.values()
        found.damaged += [fault for one in retired if (fault := _archive_fault(one, store.home, digest))]
        found.damaged += judgement_faults(store, number)
    _verify_checkpoints(project, found, digest)
    return found


def _selection_faults(project: Project, number: int) -> Iterator[DamagedFile]:
    """The files of row selections that differ from their notes. The check of the notes reports broken notes."""
    for name in project.policies:
        with suppress(StorageError):
            selection = read(project.store, number).selection(name)
            if selection is None or not selection.sha256:
                continue
            file = selection_file(project.store, number, name)
            if not fetch_unless_here(file):
                yield DamagedFile(file, "is missing")
            elif digest_file(file) != selection.sha256:
                yield DamagedFile(file, f"was changed after it was written (sha256 {selection.sha256})")


def _changed_rows(project: Project, number: int) -> Iterator[str]:
    """The rounds whose ledger has other rows or another judgement than the trainings of round ``number`` read."""
    store = project.store
    for name in project.policies:
        with suppress(StorageError):  # the check of the notes and ledgers reports those that cannot be read
            trained = read(store, number).trained(name)
            selection = {} if trained is None else trained.lineage.get("row_selection") or {}
            for key, digest in selection.get("digests", {}).items():
                if store.digest(int(key), judge_version=selection["judge_versions"][key]) != digest:
                    yield (
                        f"the training of {round_key(number)} read rows or a judgement of {round_key(int(key))} that "
                        "were replaced or removed since: restore the round from a copy if you need them"
                    )


def judgement_faults(store: ExperienceStore, number: int) -> Iterator[DamagedFile]:
    """Faults of the file that names the round's judgement in force."""
    path = store.current_file(number)
    try:
        version, judged = store.judge_version(number), read(store, number).judged
        if version is not None:
            store.judged_file(number)
    except StorageError as error:
        if str(error).startswith(str(read(store, number).file(Judged))):
            return  # the record's own damage
        yield DamagedFile(path, f"{error}: judge the round again (`rft judge`)")
        return
    if judged is not None and judged.sound and judged.judge_version != version:
        named = "is missing" if version is None else f"puts judgement {version} in force"
        name = read(store, number).file(Judged).name
        yield DamagedFile(path, f"{named}, but {name} names {judged.judge_version}: judge the round again")


def check_judgements(store: ExperienceStore) -> None:
    """Raise DamagedError if a round's judgement in force is missing, or is not the one that its record names."""
    faults = [fault for number in store.rounds() for fault in judgement_faults(store, number)]
    if faults:
        raise DamagedError("\n".join(f"{fault.path}: {fault.why}" for fault in faults[:NAMED]))


def _verify_checkpoints(project: Project, found: Verification, digest: bool) -> None:
    """Check every checkpoint, also unused ones, and every policy's note against its checkpoint."""
    policies = list(_policies(project))
    named = {Path(policy.folder) for policy in policies if project.checkpoints in Path(policy.folder).parents}
    for folder in sorted({*_checkpoint_folders(project), *named}):
        fetch_missing(folder)
        superseded = folder not in named and folder.parent == project.warm_start_checkpoints
        why = _checkpoint_fault(folder, digest, superseded)
        found.checkpoints += 1
        found.bytes += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if why is not None:
            found.damaged.append(DamagedFile(folder, why))
    found.damaged += dict.fromkeys(fault for policy in policies if (fault := contradiction(project, policy)))


def _checkpoint_fault(folder: Path, digest: bool, superseded: bool) -> str | None:
    if ((folder / THINNED).exists() or superseded) and not list(folder.glob("*.safetensors")):
        return None if (folder / MANIFEST).is_file() else f"{MANIFEST} is missing"  # reduced to its manifest on purpose
    return checkpoint_damage(folder, digest_file if digest else None)


def _checkpoint_folders(project: Project) -> Iterator[Path]:
    for folder in [*map(project.checkpoints_of, project.policies), project.warm_start_checkpoints]:
        yield from folder.glob(f"{CHECKPOINT_PREFIX}*")


def _policies(project: Project) -> Iterator[Policy]:
    """Every policy whose note can be read; the check of the notes reports the others."""
    for number in project.store.rounds():
        for name in project.policies:
            try:
                policy = published(project.store, number, name)
            except (StorageError, TypeError):
                continue
            if policy is not None:
                yield policy


def _archive_fault(retired: RetiredFile, home: Path, digest: bool) -> DamagedFile | None:
    if retired.archived_to is None:
        return None
    path, entry = from_record(retired.archived_to, home), retired.entry
    if not path.is_file():
        return DamagedFile(path, "was archived there, but is missing")
    same = path.stat().st_size == entry.bytes and (not digest or digest_file(path) == entry.sha256)
    return None if same else DamagedFile(path, f"was archived there and changed afterwards (sha256 was {entry.sha256})")
