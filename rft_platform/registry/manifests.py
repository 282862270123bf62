"""Checkpoint manifests on disk, and how checkpoints descend from one another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.errors import StorageError, UserError
from rft_platform.files import read_json

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of its making. Only ``manifest.json`` is read: the weights may be gone."""

    folder: Path
    policy_version: int
    parent: str  # folder of the checkpoint or model it was trained from, as the trainer was given it
    parent_version: int
    weights_digest: str
    lineage: Mapping[str, Any]  # round, data_digest, judge_version, config_digest, ...

    @property
    def parent_folder(self) -> Path:
        """The parent where it lies now: as recorded, or beside this checkpoint if the whole project was moved."""
        recorded = Path(self.parent)
        beside = self.folder.parent / recorded.name
        return beside if not (recorded / MANIFEST).exists() and (beside / MANIFEST).exists() else recorded


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint ``folder``; ``UserError`` where there is none, ``StorageError`` if broken."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(
            f"{folder} is no checkpoint of this platform: it has no {MANIFEST}; give a global_step_<n> folder"
        )
    try:
        found = read_json(path)
        return Manifest(
            folder=folder,
            policy_version=found["policy_version"],
            parent=found["parent"],
            parent_version=found["parent_version"],
            weights_digest=found["weights_digest"],
            lineage=found["lineage"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error!r})") from error


def chain(folder: Path) -> list[Manifest]:
    """The manifest of ``folder`` and of its ancestors, newest first, as far back as there are manifests."""
    found = [read_manifest(folder)]
    while (found[-1].parent_folder / MANIFEST).exists():
        parent = read_manifest(found[-1].parent_folder)
        if parent.folder in {known.folder for known in found}:
            raise StorageError(f"{parent.folder}: its manifest names a descendant as its parent")
        found.append(parent)
    return found


def all_manifests(root: Path) -> list[Manifest]:
    """Every checkpoint below ``root``, oldest policy version first."""
    found = [read_manifest(path.parent) for path in root.rglob(f"global_step_*/{MANIFEST}")]
    return sorted(found, key=lambda manifest: (manifest.policy_version, str(manifest.folder)))


def descendants(of: list[Manifest], among: list[Manifest]) -> list[Manifest]:
    """Those checkpoints ``among`` all that were trained, over any number of steps, from one ``of`` those given."""
    return list(_descendants({manifest.folder for manifest in of}, among))


def _descendants(family: set[Path], among: list[Manifest]) -> Iterator[Manifest]:
    """``among`` is ordered by policy version, so a parent always comes before its children."""
    for manifest in among:
        if manifest.folder not in family and manifest.parent_folder in family:
            family.add(manifest.folder)
            yield manifest
