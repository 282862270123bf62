"""Which files a training read, and whether they are unchanged since."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.errors import DamagedError
from rft_platform.files import digest_file, read_json
from rft_platform.registry.traces import RowFile

if TYPE_CHECKING:
    from rft_platform.experience.ledger import FileEntry
    from rft_platform.experience.store import ExperienceStore

DATASET_NOTE = "dataset.json"  # note in a round's folder about the dataset written there


def rows_read(lineage: Mapping[str, Any], store: "ExperienceStore | None", verify: bool) -> dict[str, Any]:
    """Return the fields of a ``TrainingTrace`` about the round's files, from the round's current ledger.

    ``store`` is None for a training of another project. With ``verify`` every byte is read and compared. Raises
    ``StorageError`` with the names of damaged files.
    """
    number, judge = lineage.get("round"), lineage.get("judge_version")
    if store is not None and number is not None and lineage.get("dataset"):
        return _dataset_read(lineage, store.round_folder(number), verify)
    if store is not None and number is not None and lineage.get("row_selection"):
        return _selection_read(lineage, store, number, verify)
    if store is None or number is None or judge is None:  # no judge: trained on demonstrations
        return {"data_unchanged": None}
    contents, folder = store.ledger(number).read(), store.round_folder(number)
    if verify:
        store.check(number, digest=True)
    found: dict[str, Any] = {
        "data_unchanged": None,
        "rollouts": tuple(_row_file(folder / name, contents.files[name]) for name in contents.rollouts()),
        "retired": contents.retirement(),
    }
    judged = store.judged_file(number, judge, contents=contents)
    if judged is None:
        return found
    entry = contents.files[str(judged.relative_to(folder))]
    if store.judge_version(number) == judge:
        same = store.digest(number) == lineage.get("data_digest")
        found["data_unchanged"] = same and not store.damaged_sizes(number, contents)
    return {**found, "judged": _row_file(judged, entry), "rows_trained": entry.kept or 0}


def _selection_read(
    lineage: Mapping[str, Any], store: "ExperienceStore", training: int, verify: bool
) -> dict[str, Any]:
    """Return the fields for rows that were selected one by one: the selection file and the rollouts behind it."""
    from rft_platform.experience.selections import TRAINED_ON, selection_file

    settled, file = lineage["row_selection"], selection_file(store, training, lineage.get("policy"))
    versions = {int(number): version for number, version in settled["judge_versions"].items()}
    rollouts, retired, same = [], [], file.is_file() and digest_file(file) == settled["sha256"]
    if verify and not same:
        raise DamagedError(f"{file}: missing, or not what was trained on (sha256 {settled['sha256'][:16]})")
    for number, version in sorted(versions.items()):
        contents, folder = store.ledger(number).read(), store.round_folder(number)
        if verify:
            store.check(number, digest=True)
        rollouts += [_row_file(folder / name, contents.files[name]) for name in contents.rollouts()]
        retired += [contents.retirement()] if contents.retired else []
        there = store.judged_file(number, version, contents=contents) is not None
        same = same and there and store.digest(number, judge_version=version) == settled["digests"][str(number)]
        same = same and not store.damaged_sizes(number, contents)
    rows = sum(settled["rows"][use] for use in TRAINED_ON)
    return {
        "data_unchanged": same,
        "rollouts": tuple(rollouts),
        "retired": "; ".join(retired),
        "selection": RowFile(str(file), settled["sha256"], sum(settled["rows"].values())),
        "rows_trained": rows,
    }


def _dataset_read(lineage: Mapping[str, Any], folder: Path, verify: bool) -> dict[str, Any]:
    """Return the fields for the dataset of an offline training, from its round's note and file as they are now."""
    file, digest, note = folder / str(lineage["dataset"]), str(lineage["dataset_sha256"]), folder / DATASET_NOTE
    known = read_json(note) if note.exists() else {}
    if known.get("digest") != lineage.get("data_digest"):  # another project of the same name, in another folder
        return {"data_unchanged": None}
    same = file.exists() and file.stat().st_size == known["bytes"]
    if verify and not (same and digest_file(file) == digest):
        raise DamagedError(f"{file}: missing, or not what was trained on (sha256 {digest[:16]})")
    rows = int(lineage["dataset_rows"])
    return {"data_unchanged": same, "dataset": RowFile(str(file), digest, rows), "rows_trained": rows}


def _row_file(path: Path, entry: "FileEntry") -> RowFile:
    return RowFile(str(path), entry.sha256, entry.rows)
